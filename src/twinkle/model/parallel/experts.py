"""Experts that ranks share: each holds some of a layer's, and tokens travel to the ranks of theirs and back.

How tokens travel is transformers' affair, and which modules are experts is said by the model's own plan. Here stands
how the ranks are grouped and how the weights lie. ``ep_size`` neighbouring ranks hold all experts once; ranks at the
same place of different groups hold the same ones, and under FSDP shard these among themselves. A rank whose tokens miss
its own experts, or all those of another, takes part in the exchange with none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import ParamWrapper
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.infra import DeviceMesh, Platform

try:
    from transformers.distributed.expert_parallel import apply_expert_parallelism
except ImportError:  # of a transformers that cannot exchange tokens yet
    apply_expert_parallelism = None  # type: ignore[assignment]

EXPERT_AXIS, COPIES_AXIS, BATCH_AXIS = "ep", "ep_fsdp", "same_batch"
EXCHANGED = "ep_dispatch_experts"
"""What a model's plan says of modules whose tokens are brought to them."""
LOCAL_FORWARD = "runs_local_experts"
LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, eq=False)
class SharedExperts:
    """The modules of a model whose weights are spread over ranks, and the ranks' mesh."""

    modules: tuple[torch.nn.Module, ...]
    mesh: TorchDeviceMesh

    @property
    def num_copies(self) -> int:
        """How many ranks have each expert."""
        return self.mesh[COPIES_AXIS].size()

    @property
    def is_first_copy(self) -> bool:
        """Whether this is the first of the ranks that have its experts."""
        return self.mesh[COPIES_AXIS].get_local_rank() == 0

    def adapt(self, model: Any) -> None:
        """Let adapters on experts, which hold those of all ranks, add to each rank's own; once there is one."""
        for outermost in _wrappers(model):
            if outermost.get_base_layer() in self.modules and LOCAL_FORWARD not in vars(outermost):
                for wrapper in _chain(outermost):
                    self._take_own_share(wrapper)
                setattr(outermost, LOCAL_FORWARD, True)
                outermost.forward = partial(_run_local, outermost.get_base_layer(), outermost.forward)

    def _take_own_share(self, wrapper: Any) -> None:
        def own(expert_tensor: Any) -> Any:
            is_by_expert = isinstance(expert_tensor, torch.Tensor) and expert_tensor.dim() > 0
            return expert_tensor.chunk(place.size())[place.get_local_rank()] if is_by_expert else expert_tensor

        def own_factors(adapter_name: str) -> tuple[Any, ...]:
            return tuple(own(factor) for factor in factors(adapter_name))

        def own_delta(adapter_name: str) -> Any:
            return own(delta(adapter_name))

        place = self.mesh[EXPERT_AXIS]
        factors, delta = wrapper.get_delta_factors, wrapper.get_delta_weight
        wrapper.get_delta_factors, wrapper.get_delta_weight = own_factors, own_delta

    def shard(self, model: Any, **policies: Any) -> set[torch.nn.Parameter]:
        """Spread each expert over the ranks that have it; the parameters that no other sharding may touch."""
        spread = {parameter for module in self.modules for parameter in module.parameters()}
        if self.num_copies == 1:
            return spread
        wrapped = {outermost.get_base_layer(): outermost for outermost in _wrappers(model)}
        for module in self.modules:
            # Adapters on experts are whole on every rank: their gradients come from all ranks.
            outermost = wrapped.get(module, module)
            own = set(outermost.parameters()) - spread
            fully_shard(
                outermost,
                mesh=self.mesh[COPIES_AXIS],
                shard_placement_fn=self._placement,
                ignored_params=own,
                **policies,
            )
            assert isinstance(outermost, FSDPModule)
            outermost.set_gradient_divide_factor(1.0)
            outermost.set_force_sum_reduction_for_comms(True)
        return set()

    def _placement(self, parameter: torch.nn.Parameter) -> Shard:
        """Along what an expert's matrices have most of: experts themselves lie on the other axis already."""
        for dimension in range(1, parameter.dim()):
            if parameter.shape[dimension] % self.num_copies == 0:
                return Shard(dimension)
        raise ConfigError(
            f"ep_size: {self.num_copies} ranks have each expert, which does not divide its shape"
            f" {tuple(parameter.shape[1:])}; choose a larger ep_size"
        )

    def reduce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of experts over the ranks that have them, where these are not sharded."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            if self.num_copies > 1:
                distributed.all_reduce(gradient.to_local(), group=self.mesh[COPIES_AXIS].get_group())


def share_experts(model: Any, mesh: DeviceMesh | None, settings: Mapping[str, Any]) -> SharedExperts | None:
    """Leave each rank its experts of a model that every rank has whole; None where none are shared. In place.

    Args:
        model: Just loaded, without adapters.
        mesh: Its ``ep_size`` says how many ranks share.
        settings: ``fsdp_config["expert_parallel"]``: ``enabled``, and settings that have no effect here.

    Raises:
        ConfigError: The model has no experts that can be shared, or not a multiple of ``ep_size``.
    """
    if mesh is None or mesh.ep_world_size == 1:
        return None
    if not settings.get("enabled", True):
        raise InvalidInput(
            "fsdp_config.expert_parallel.enabled", "is false, but the mesh has an ep_size; leave one out"
        )
    if apply_expert_parallelism is None:
        raise ConfigError("ep_size: needs a transformers that exchanges tokens; pip install 'transformers>=5.23'")
    plan = _plan(model)
    places = [name for name, style in plan.items() if style == EXCHANGED]
    if not places:
        raise ConfigError(f"ep_size: {type(model).__name__} has no experts that ranks can share; set it to 1")
    modules = tuple(model.get_submodule(name) for name in places)
    for module in modules:
        if module.num_experts % mesh.ep_world_size:
            raise ConfigError(f"ep_size: {mesh.ep_world_size} ranks cannot share {module.num_experts} experts evenly")
    grid = _expert_mesh(mesh)
    apply_expert_parallelism(model, grid[EXPERT_AXIS], grid[BATCH_AXIS], plan, ep_implementation="all_to_all")
    return SharedExperts(modules, grid)


def _wrappers(model: Any) -> Iterator[Any]:
    """The outermost of PEFT's modules around each module whose parameters it adapts."""
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, ParamWrapper) and not isinstance(parent, ParamWrapper):
                yield child


def _chain(wrapper: Any) -> Iterator[Any]:
    while isinstance(wrapper, ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def _run_local(experts: torch.nn.Module, run: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run experts whose adapters fold into the weights, on this rank's part of these as plain tensors."""
    parameters: dict[str, Any] = experts._parameters
    spread = {name: value for name, value in parameters.items() if isinstance(value, DTensor)}
    parameters.update({name: value.to_local() for name, value in spread.items()})
    try:
        return run(*args, **kwargs)
    finally:
        for name, value in spread.items():
            # Where it puts a weight back after folding, torch takes one that is no parameter for a buffer.
            experts._buffers.pop(name, None)
            parameters[name] = value


def step_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer take parameters on several meshes, which torch's operations on lists of tensors do not."""
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False


def is_spread(parameter: torch.Tensor) -> bool:
    """Whether a parameter is one of shared experts'."""
    return isinstance(parameter, DTensor) and EXPERT_AXIS in (parameter.device_mesh.mesh_dim_names or ())


def _plan(model: Any) -> dict[str, str]:
    """The model's own plan, each module and parameter by its name."""
    named: Iterator[tuple[str, Any]] = (*model.named_modules(), *model.named_parameters())  # type: ignore[assignment]
    styles = {name: model.ep_plan.get(LAYER_NUMBER.sub(".*", name)) for name, _ in named}
    # Parameters first: what brings tokens to a module asks it how many experts it was left.
    found = {name: style for name, style in styles.items() if style is not None}
    return dict(sorted(found.items(), key=lambda item: item[1] == EXCHANGED))


def _expert_mesh(mesh: DeviceMesh) -> TorchDeviceMesh:
    groups = sorted({tuple(mesh.expert_ranks(rank)) for rank in range(mesh.world_size)})
    device_type = mesh.device_type or Platform.current().device_type
    return TorchDeviceMesh(
        Platform.named(device_type).device_type,
        torch.from_numpy(np.array(groups))[..., None],
        mesh_dim_names=(COPIES_AXIS, EXPERT_AXIS, BATCH_AXIS),
    )
