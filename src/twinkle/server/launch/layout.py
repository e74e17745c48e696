"""On how many ranks a model of a ``server_config.yaml`` is, in which layout, and by which engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import Any

from twinkle.core.errors import ConfigError
from twinkle.core.mesh import WHOLE_MODEL
from twinkle.server.launch.plan import Fate, Plan
from twinkle.server.launch.schema import DeviceGroup, DeviceMesh, ModelArgs, SamplerArgs

_SERVED_AXES = ("tp_size", "pp_size", "ep_size")
_OTHER_AXES = ("dp_size", "fsdp_size", "cp_size", "ulysses_size", "etp_size", "vpp_size")
_MEGATRON = "megatron"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a model's ranks are, and what its mesh says of itself in its ``--mesh`` flag."""

    device: str
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def trains_only(self) -> bool:
        """Whether what samples from the model needs a mesh of its own."""
        return self.parts.get("engine") == _MEGATRON or self.trains_whole_model

    @property
    def trains_whole_model(self) -> bool:
        """Whether the mesh has one run at a time, of all the model's weights."""
        return self.parts.get("serves") == WHOLE_MODEL

    @property
    def flag(self) -> str:
        """After the mesh's name."""
        return ",".join([self.device, *(f"{key}={value}" for key, value in self.parts.items())])


def layout_of(plan: Plan, where: str, args: ModelArgs | SamplerArgs, *, cuda: bool) -> Layout:
    """Take a model's device, ranks and engine as far as they go, and say of each what became of it.

    Raises:
        ConfigError: A size of the mesh is no number.
    """
    device = _device(plan, where, args.device_group, args.device_mesh, cuda=cuda)
    if isinstance(args, ModelArgs) and args.train_mode == "full":
        return _whole_model(plan, where, args, device)
    if isinstance(args, ModelArgs) and args.train_mode is not None:
        plan.note(f"{where}.train_mode", args.train_mode, "used", "adapters are trained, of all tenants")
    if not isinstance(args, ModelArgs) or not _wants_megatron(args):
        _ranks(plan, where, args, device)
        return Layout(device=device)
    sizes = _sizes(f"{where}.device_mesh", args.device_mesh)
    tensor, pipeline, expert = (sizes.get(axis, 1) for axis in _SERVED_AXES)
    if _is_within_tensors(sizes):
        expert = 1
    reason = _why_not_by_megatron(plan, args, sizes, device)
    key, value = _asked(where, args)
    if reason is not None:
        plan.note(key, value, "changed", f"the transformers engine serves it: {reason}")
        _ranks(plan, where, args, device)
        return Layout(device=device)
    ranks = tensor * pipeline * expert
    note = f"TWINKLE_ENGINE=megatron for its mesh, tensors over {tensor} ranks and layers over {pipeline}"
    note += f", experts over {expert} times as many; it trains" if expert > 1 else "; it trains"
    plan.note(key, value, "mapped", f"{note}, and what samples has a mesh of its own")
    if args.nproc_per_node is not None:
        fate: Fate = "used" if args.nproc_per_node == ranks else "changed"
        product = f"tp_size {tensor} times pp_size {pipeline} times ep_size {expert}"
        note = f"{ranks} ranks" + ("" if fate == "used" else f", as {product} says")
        plan.note(f"{where}.nproc_per_node", args.nproc_per_node, fate, note)
    parts = {"ranks": str(ranks), "engine": _MEGATRON, "tensor": str(tensor), "pipeline": str(pipeline)}
    parts |= {"expert": str(expert)} if expert > 1 else {}
    # Of the settings, which may name vLLM for the mesh that samples.
    parts["sampler"] = "torch"
    return Layout(device=device, parts=parts)


def _whole_model(plan: Plan, where: str, args: ModelArgs, device: str) -> Layout:
    if plan.on_cluster:
        raise ConfigError(
            f"{where}.train_mode: full trains on a device of this machine, and the ranks are on Ray's nodes"
        )
    note = f"TWINKLE_SERVES={WHOLE_MODEL} for its mesh: one run at a time, of all the model's weights, on one rank"
    plan.note(f"{where}.train_mode", args.train_mode, "mapped", f"{note}; what samples has a mesh of its own")
    if _wants_megatron(args):
        plan.note(*_asked(where, args), "changed", "transformers trains whole models")
    if args.nproc_per_node is not None:
        fate: Fate = "used" if args.nproc_per_node == 1 else "changed"
        plan.note(f"{where}.nproc_per_node", args.nproc_per_node, fate, "one rank")
    parts = {"ranks": "1", "engine": "transformers", "serves": WHOLE_MODEL, "sampler": "torch"}
    return Layout(device=device, parts=parts)


def layout_to_sample(plan: Plan, where: str, args: SamplerArgs, *, cuda: bool) -> Layout:
    """The same of a mesh that only samples, beside one that only trains."""
    device = _device(plan, where, args.device_group, args.device_mesh, cuda=cuda)
    ranks = args.nproc_per_node or 1
    group = args.device_group
    named = group.ranks if group is not None and isinstance(group.ranks, list) else []
    if device == "cuda" and not plan.on_cluster and len(named) == 1:
        device = f"cuda:{named[0]}"
    if args.nproc_per_node is not None:
        is_kept = plan.on_cluster or device != "cpu" or ranks == 1
        ranks = ranks if is_kept else 1
        note = f"{ranks} ranks" if is_kept else "one process; on a CPU more would share its cores"
        plan.note(f"{where}.nproc_per_node", args.nproc_per_node, "used" if is_kept else "changed", note)
    return Layout(device=device, parts={"ranks": str(ranks), "engine": "transformers", "serves": "samples"})


def _wants_megatron(args: ModelArgs) -> bool:
    return bool(args.use_megatron) or args.backend == _MEGATRON


def _asked(where: str, args: ModelArgs) -> tuple[str, object]:
    """The key that asks for Megatron, and what it holds."""
    return (f"{where}.use_megatron", True) if args.use_megatron else (f"{where}.backend", args.backend)


def _why_not_by_megatron(plan: Plan, args: ModelArgs, sizes: Mapping[str, int], device: str) -> str | None:
    # The ranks that share experts have different rows, and tensor ranks split each expert.
    same = {"dp_size": sizes.get("ep_size", 1), "etp_size": sizes.get("tp_size", 1)}
    if sizes.get("ep_size", 1) > 1 and sizes.get("dp_size", 1) == 1 and not _is_within_tensors(sizes):
        return f"ep_size {sizes['ep_size']} needs as many data ranks (dp_size), or tensor ranks (tp_size)"
    others = {axis: sizes[axis] for axis in _OTHER_AXES if sizes.get(axis, 1) not in (1, same.get(axis, 1))}
    if others:
        told = ", ".join(f"{axis} {size}" for axis, size in others.items())
        return (
            "a mesh by Megatron spreads tensors (tp_size), layers (pp_size) and experts (ep_size, which is its dp_size"
            f" too) over its ranks, and has no {told}"
        )
    if prod(sizes.get(axis, 1) for axis in _SERVED_AXES) == 1:
        return "one rank holds the model whole; set device_mesh.tp_size, pp_size or ep_size to spread it"
    asked = [part.device_type for part in (args.device_group, args.device_mesh) if part is not None]
    is_for_cpu = any(kind is not None and kind.lower() == "cpu" for kind in asked)
    if device == "cpu" and not plan.on_cluster and not is_for_cpu:
        return "there is no GPU here, and ranks would share this machine's cores"
    if not _has_megatron():
        return "Megatron is not installed here; install twinkle-queue[megatron]"
    return None


def _is_within_tensors(sizes: Mapping[str, int]) -> bool:
    """Whether tensor ranks have the experts among them: each of them then holds a part of every expert."""
    return sizes.get("dp_size", 1) == 1 and sizes.get("tp_size", 1) % sizes.get("ep_size", 1) == 0


def _has_megatron() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def _sizes(where: str, mesh: DeviceMesh | None) -> dict[str, int]:
    """The sizes that a file gives, by name or as a grid of ranks with the names of its axes."""
    held = {} if mesh is None else mesh.keys
    names, grid = held.get("mesh_dim_names"), held.get("mesh")
    if isinstance(names, list) and isinstance(grid, list):
        held = {**held, **{f"{name}_size": size for name, size in zip(names, _shape(grid), strict=False)}}
    sizes = {}
    for axis in (*_SERVED_AXES, *_OTHER_AXES):
        size = held.get(axis)
        if size is None:
            continue
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{where}.{axis}: is {size!r}, must be a number of ranks, at least 1")
        sizes[axis] = size
    return sizes


def _shape(grid: Any) -> list[int]:
    return [len(grid), *_shape(grid[0])] if isinstance(grid, list) and grid else []


def _device(plan: Plan, where: str, group: DeviceGroup | None, mesh: DeviceMesh | None, *, cuda: bool) -> str:
    asked = next((part.device_type for part in (group, mesh) if part is not None and part.device_type), "cuda")
    wants_gpu = asked.lower() in {"cuda", "gpu"}
    device = "cuda" if wants_gpu and cuda else ("cpu" if wants_gpu else asked.lower())
    for key, part in (("device_group", group), ("device_mesh", mesh)):
        if part is None:
            continue
        if wants_gpu and not cuda:
            plan.note(f"{where}.{key}", part, "changed", "there is no GPU here, so it runs on the CPU")
        else:
            plan.note(f"{where}.{key}", part, "mapped", f"device {device}")
    return device


def _ranks(plan: Plan, where: str, args: ModelArgs | SamplerArgs, device: str) -> None:
    key, ranks = f"{where}.nproc_per_node", args.nproc_per_node
    if ranks is None and plan.on_cluster and args.device_group is not None and args.device_group.ranks is not None:
        named = args.device_group.ranks
        key, ranks = f"{where}.device_group.ranks", len(named) if isinstance(named, list) else named
    if ranks is None:
        return
    if (device == "cpu" and not plan.on_cluster) or ranks == 1:
        fate: Fate = "used" if ranks == 1 else "changed"
        plan.note(key, ranks, fate, "one process; on a CPU more would share its cores" if ranks > 1 else "one process")
    else:
        plan.map(key, ranks, "TWINKLE_RANKS", str(ranks))
