"""Where a model's weights go: on which device, in which dtype, and how they lie over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import torch
import transformers
from peft import PeftModel
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.process.events import event_log
from twinkle.infra import DeviceMesh, Platform
from twinkle.infra.platform import local_rank
from twinkle.infra.process_group import group_of_ranks, torch_mesh
from twinkle.model.device_traits import plain_dtype
from twinkle.model.parallel.experts import SharedExperts
from twinkle.model.parallel.gradient_sync import GradientSync, OneRank, ReplicatedRanks, ShardedRanks, data_group
from twinkle.model.parallel.settings import FsdpSettings
from twinkle.model.parallel.spread import can_be_spread, class_of, load_spread, spread_parameters_kept

log = event_log()

MixedPrecision = Literal["bf16", "fp16", "fp8", "no"]
ATTENTION = "attn_implementation"


def model_class(model_cls: Any) -> Any:
    """The transformers class to load a model with: as given, by its name, or by default the causal language model.

    Raises:
        InvalidInput: transformers has no class of that name.
    """
    if model_cls is None:
        return transformers.AutoModelForCausalLM
    if not isinstance(model_cls, str):
        return model_cls
    if model_cls not in dir(transformers):
        raise InvalidInput("model_cls", f"transformers has no class {model_cls!r}; send its name or the class")
    return getattr(transformers, model_cls)


@dataclass(frozen=True)
class ModelArguments:
    """The arguments by which a model is loaded, whichever order they came in."""

    model_cls: Any
    model_id: str
    config: Any
    device_mesh: DeviceMesh | None
    mixed_precision: MixedPrecision | None

    @classmethod
    def of(cls, model_cls: Any, model_id: Any, config: Any, device_mesh: Any, mixed_precision: Any) -> ModelArguments:
        """The arguments in their places; by position the class may stand before the model's id.

        Raises:
            InvalidInput: There is no model's id, or ``model_cls`` came twice.
        """
        if isinstance(config, (str, PathLike)) or isinstance(model_id, type):
            if model_cls is not None:
                raise InvalidInput("model_cls", "came twice, by position and by name; send it once")
            model_cls, model_id, config, device_mesh = model_id, config, device_mesh, mixed_precision
            mixed_precision = None
        if model_id is None:
            raise InvalidInput("model_id", "is missing; send a folder or an id of a hub")
        return cls(model_cls, model_id, config, device_mesh, mixed_precision)


def load_model_on(loader: Any, path: str, mesh: DeviceMesh | None, device: torch.device, **settings: Any) -> Any:
    """A model of transformers on a rank's device; where the mesh has ``fsdp``, of each weight this rank's share alone.

    Whole on every rank are experts that ranks share, what is not in safetensors files, and a model of a class with
    weights that the files lack: these are drawn, and the same on every rank. All ranks must call it together.

    Args:
        loader: A class of transformers.
        path: A folder, or an id of a hub.
        mesh: The ranks.
        device: Of this one.
        settings: Of ``from_pretrained``.
    """
    if mesh is not None and mesh.size("fsdp") > 1 and not mesh.ep_size and can_be_spread(path, settings):
        of_config = {name: value for name, value in settings.items() if name not in ("dtype", "torch_dtype")}
        # What a rank draws for its share, another one does not: a model that is drawn whole must be the same on both.
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            model, info = load_spread(
                class_of(loader, path, **of_config),
                path,
                torch_mesh(mesh)["fsdp"],
                device,
                choose=lambda model: model.parameters(),
                **settings,
            )
        if not info["missing_keys"]:
            return model
        log.info("model.loaded_whole", reason="the files lack weights of the class", first=min(info["missing_keys"]))
        del model
    return loader.from_pretrained(path, **settings).to(device)


def attention_for(device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``from_pretrained``; flash attention, which no CPU has, is left out there, and the log says so."""
    asked = settings.get(ATTENTION)
    if device.type != "cpu" or not isinstance(asked, str) or not asked.startswith("flash"):
        return dict(settings)
    log.warning("model.attention.on_cpu", asked=asked, next="it needs a GPU; transformers' default takes its place")
    return {name: value for name, value in settings.items() if name != ATTENTION}


def device_of(mesh: DeviceMesh | None) -> torch.device:
    """The device of this rank: of the mesh's kind if it names one, else what the machine has."""
    platform = Platform.current() if mesh is None or mesh.device_type is None else Platform.named(mesh.device_type)
    return torch.device(platform.device_of(local_rank()))


def computes_in_bf16(mixed_precision: str | None, device: torch.device) -> bool:
    """Whether products are made in bfloat16: as asked, by default on accelerators that can.

    Raises:
        InvalidInput: Another precision was asked for.
    """
    if mixed_precision not in (None, "bf16", "no"):
        others = "; 'fp16' and 'fp8' are TransformersModel's" if mixed_precision in ("fp16", "fp8") else ""
        raise InvalidInput("mixed_precision", f"is {mixed_precision!r}; send 'bf16' or 'no'{others}")
    return mixed_precision == "bf16" or (mixed_precision is None and plain_dtype(device.type) == torch.bfloat16)


def compute_dtype(mixed_precision: str | None, device: torch.device) -> torch.dtype | None:
    """In which dtype products are made; None where as the weights are.

    Raises:
        InvalidInput: Another precision was asked for.
    """
    if mixed_precision == "fp16":
        return torch.float16
    if mixed_precision == "fp8":
        # What is no linear layer, and what goes into these.
        return torch.bfloat16
    if mixed_precision not in (None, "bf16", "no"):
        raise InvalidInput("mixed_precision", f"is {mixed_precision!r}; send 'bf16', 'fp16', 'fp8' or 'no'")
    return torch.bfloat16 if computes_in_bf16(mixed_precision, device) else None


def weights_dtype(mixed_precision: str | None, device: torch.device) -> torch.dtype:
    """The dtype of weights that are not trained."""
    return torch.bfloat16 if computes_in_bf16(mixed_precision, device) else torch.float32


def training_sync(mesh: DeviceMesh | None, device: torch.device) -> GradientSync:
    """How the ranks of a mesh bring their gradients together.

    Raises:
        ConfigError: The mesh does more than data parallelism and sharding, or the processes have not met.
    """
    if mesh is None or mesh.world_size == 1:
        return OneRank()
    mesh.require_data_axes("TransformersModel", also=("ulysses_size", "ep_size"), model_parallel="MegatronModel")
    world = data_group(mesh)
    with_other_rows = None
    if mesh.ulysses_world_size > 1:
        ranks = range(mesh.world_size)
        with_other_rows = group_of_ranks(
            [
                sorted({mesh.sequence_ranks(other)[mesh.sequence_ranks(rank).index(rank)] for other in ranks})
                for rank in ranks
            ]
        )
    kind = ShardedRanks if mesh.size("fsdp") > 1 else ReplicatedRanks
    return kind(world, device, with_other_rows=with_other_rows)


def shard(
    model: Any,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None,
    settings: FsdpSettings = FsdpSettings(),
    experts: SharedExperts | None = None,
) -> None:
    """Spread the weights over the ``fsdp`` axis, layer by layer, and replicate them over ``dp``; in place.

    Experts that ranks share are spread over those that have the same.

    Gradients come out summed over all ranks, not averaged.

    Args:
        model: Of transformers.
        mesh: With the axes.
        dtype: In which products are made; None: as weights are.
        settings: FSDP's.
        experts: That ranks share.
    """
    over = torch_mesh(mesh)
    names = tuple(axis for axis in ("dp", "fsdp") if mesh.size(axis) > 1)
    # Scaled gradients in float16, added up over ranks, would leave its range.
    summed_in = torch.float32 if dtype == torch.float16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=summed_in)
    layers = _decoder_layers(model)
    policies: dict[str, Any] = {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": settings.reshard_after_forward,
    }
    ignored = set() if experts is None else experts.shard(model, **policies)
    # Where ranks share experts these are spread already, and nothing else is.
    with nullcontext() if experts is not None else spread_parameters_kept(model):
        for module in (*layers, model):
            fully_shard(module, mesh=over[names], ignored_params=ignored, **policies)
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
