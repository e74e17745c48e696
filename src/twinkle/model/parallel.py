"""One transformers model over the ranks of a mesh: replicated, or with its weights sharded (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from twinkle.core.errors import ConfigError
from twinkle.infra import DeviceMesh
from twinkle.infra.process_group import torch_mesh
from twinkle.model.gradient_sync import GradientSync, OneRank, ReplicatedRanks, ShardedRanks, data_group


def training_sync(mesh: DeviceMesh | None, device: torch.device) -> GradientSync:
    """How the ranks of a mesh bring their gradients together.

    Raises:
        ConfigError: The mesh does more than data parallelism and sharding, or the processes have not met.
    """
    if mesh is None or mesh.world_size == 1:
        return OneRank()
    mesh.require_data_axes("TransformersModel")
    group = data_group(mesh)
    return ShardedRanks(group, device) if mesh.size("fsdp") > 1 else ReplicatedRanks(group, device)


def shard(model: Any, mesh: DeviceMesh, *, in_bf16: bool) -> None:
    """Spread the weights over the ``fsdp`` axis, layer by layer, and replicate them over ``dp``; in place.

    Gradients come out summed over all ranks, not averaged.
    """
    over = torch_mesh(mesh)
    names = tuple(axis for axis in ("dp", "fsdp") if mesh.size(axis) > 1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if in_bf16 else None)
    layers = _decoder_layers(model)
    for module in (*layers, model):
        fully_shard(module, mesh=over[names], mp_policy=policy)
    for module in (*layers, model):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # Gloo knows no scaled sums, and none is wanted.
        module.set_force_sum_reduction_for_comms(True)


def _decoder_layers(model: Any) -> list[torch.nn.Module]:
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    names = frozenset(base._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"fsdp_size: {type(model).__name__} does not say which of its modules are layers")
    return layers
