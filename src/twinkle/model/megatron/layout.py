"""A device mesh as Megatron's process groups."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from twinkle.core.errors import ConfigError
from twinkle.infra import DeviceMesh
from twinkle.infra.process_group import leave_world
from twinkle.model.micro_batches import random_state, set_random_state

RandomStates = tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]

ORDER = "tp-cp-ep-dp-pp"
"""Of Megatron's axes, the innermost first: what ``DeviceMesh.from_sizes`` makes."""
AXES = ("tp", "cp", "dp", "pp")
MODEL_PARALLEL_SEED = 2718
"""Between the seeds of ranks that share tensors, and those of experts: Megatron's own numbers."""
EXPERT_SEED = 1024


class Layout:
    """Where this rank stands, and its groups. Megatron keeps one layout for a process; all ranks must make it together.

    Raises:
        ConfigError: The mesh has axes that Megatron has not, is in another order, or differs from the layout that this
            process has already.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, *, seed: int) -> None:
        _check(mesh)
        if device.type == "cpu" and (mesh.ep_size or 1) > 1 and mesh.etp_size > 1:
            raise ConfigError(
                f"etp_size: is {mesh.etp_size} beside ep_size {mesh.ep_size}, which takes NCCL: their ranks have"
                " different numbers of tokens, and gloo gathers like ones. On a CPU set it to 1"
            )
        self.mesh = mesh
        self.device = device
        if not distributed.is_initialized():
            if mesh.world_size > 1:
                raise ConfigError(
                    "device_mesh: the processes have not met; call twinkle.initialize(mode='local') first"
                )
            # Megatron has groups even of one rank.
            distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        if distributed.get_world_size() != mesh.world_size:
            raise ConfigError(
                f"device_mesh: has {mesh.world_size} ranks ({mesh}), but {distributed.get_world_size()} processes were"
                " started"
            )
        if not parallel_state.model_parallel_is_initialized():
            # Else the threads of many groups end in the middle of something, and the process with them.
            atexit.register(_leave_world)
            parallel_state.initialize_model_parallel(
                mesh.size("tp"),
                mesh.size("pp"),
                mesh.vpp_size if (mesh.vpp_size or 1) > 1 else None,
                context_parallel_size=mesh.size("cp"),
                expert_model_parallel_size=mesh.ep_size or 1,
                expert_tensor_parallel_size=mesh.etp_size,
                create_gloo_process_groups=False,
                order=ORDER,
            )
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self._require_same(mesh)
        self._seed_dropout(seed)

    @property
    def tp_size(self) -> int:
        """Ranks that share tensors."""
        return self.mesh.size("tp")

    @property
    def pp_size(self) -> int:
        """Ranks that share the layers."""
        return self.mesh.size("pp")

    @property
    def vpp_size(self) -> int:
        """Stages on each rank."""
        return self.mesh.vpp_size or 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer."""
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    def _require_same(self, mesh: DeviceMesh) -> None:
        own: dict[str, Sequence[int]] = {
            axis: distributed.get_process_group_ranks(group)
            for axis, group in (
                ("tp", self.groups.tp),
                ("cp", self.groups.cp),
                ("dp", self.groups.dp),
                ("pp", self.groups.pp),
            )
        }
        for axis in AXES:
            if list(own[axis]) != mesh.ranks_along(axis):
                raise ConfigError(
                    f"device_mesh: ranks {mesh.ranks_along(axis)} lie along {axis}, Megatron has {list(own[axis])} in"
                    " this process; make every mesh by DeviceMesh.from_sizes, and of a process the same"
                )
        sizes = (parallel_state.get_expert_model_parallel_world_size(), self.groups.expt_tp.size())
        stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        if sizes != (mesh.ep_size or 1, mesh.etp_size) or stages != self.vpp_size:
            raise ConfigError(
                f"device_mesh: Megatron has ep_size {sizes[0]}, etp_size {sizes[1]}, vpp_size {stages} in this process"
                " already; use the same for all its models"
            )

    def _seed_dropout(self, seed: int) -> None:
        """Let ranks with different parts of a tensor drop different values, and those with the same part the same."""
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        tp_rank, ep_rank = self.groups.tp.rank(), self.groups.ep.rank()
        tracker.add("data-parallel-rng", seed)
        tracker.add("model-parallel-rng", seed + MODEL_PARALLEL_SEED + tp_rank)
        tracker.add("expert-parallel-rng", seed + EXPERT_SEED + 100 * ep_rank + self.groups.expt_tp.rank())


def random_states() -> RandomStates:
    """Torch's random state and those that Megatron keeps beside it."""
    return random_state(), get_cuda_rng_tracker().get_states()


def set_random_states(states: RandomStates) -> None:
    """Put them back."""
    own, kept = states
    set_random_state(own)
    get_cuda_rng_tracker().set_states(dict(kept))


def leave_layout() -> None:
    """Forget the process's layout, so that another may be made."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _leave_world() -> None:
    leave_layout()
    leave_world()


def mesh_or_alone(mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """The mesh, or that of one rank."""
    return mesh or DeviceMesh.from_sizes(dp_size=1, device_type=device.type)


def _check(mesh: DeviceMesh) -> None:
    for name, size in (("fsdp_size", mesh.size("fsdp")), ("ulysses_size", mesh.ulysses_size or 1)):
        if size > 1:
            raise ConfigError(
                f"{name}: is {size}, which MegatronModel has not; it has dp_size (with a distributed optimizer),"
                " tp_size, pp_size, vpp_size, cp_size and ep_size. TransformersModel has it"
            )
    if (mesh.vpp_size or 1) > 1 and mesh.size("pp") == 1:
        raise ConfigError(f"vpp_size: is {mesh.vpp_size} with pp_size 1; virtual stages need a pipeline, set pp_size")
    if mesh.sequence_parallel and mesh.size("tp") == 1:
        raise ConfigError("sequence_parallel: needs tp_size above 1; leave it out")
