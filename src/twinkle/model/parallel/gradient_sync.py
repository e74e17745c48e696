"""Gradients of data-parallel ranks as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import distributed
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from twinkle.checkpoint_engine.sharded import whole
from twinkle.core.errors import ConfigError
from twinkle.core.process.events import event_log
from twinkle.infra import DeviceMesh
from twinkle.model.parallel.experts import SharedExperts, is_spread

log = event_log()

BUCKET_BYTES = 32 << 20
CLIP_EPSILON = 1e-6
"""Torch's, in clip_grad_norm_."""


class GradientSync(Protocol):
    """What the ranks of a model have to tell each other at the end of an accumulation window."""

    process_group: distributed.ProcessGroup | None
    """Of the ranks whose rows differ, this one among them: over these counts and metrics are taken."""

    def share(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give every rank the values that the first one has: each has drawn its own."""
        ...

    def reduce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make every gradient the sum over all ranks."""
        ...

    def keep_once(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Where every rank has the sum already, empty it on all but one: a window that goes on is summed again."""
        ...

    def sum_over_ranks(self, count: int) -> int:
        """A count over all ranks."""
        ...

    def count_once(self, count: int) -> int:
        """A count that every rank has, on one of them, and 0 on the others."""
        ...

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_grad_norm: float, norm_type: float) -> float:
        """Clip the gradients by their norm over all parameters, wherever these lie; the norm before."""
        ...

    def with_experts(self, experts: SharedExperts) -> GradientSync:
        """The same, once the ranks share experts."""
        ...


class OneRank:
    """Nobody to talk to."""

    process_group: distributed.ProcessGroup | None = None

    def share(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to do."""

    def reduce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to do."""

    def keep_once(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to do."""

    def sum_over_ranks(self, count: int) -> int:
        """The count itself."""
        return count

    def count_once(self, count: int) -> int:
        """The count itself."""
        return count

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_grad_norm: float, norm_type: float) -> float:
        """Clip them."""
        return float(clip_gradients(parameters, max_grad_norm, norm_type))

    def with_experts(self, experts: SharedExperts) -> GradientSync:
        """These."""
        return self


class ReplicatedRanks:
    """Every rank holds all weights: gradients are summed by one all-reduce a bucket, once in a window.

    Torch's DistributedDataParallel would overlap this with the backward pass, but sums at every micro-batch unless told
    not to, and does not bear adapters that take no part in a pass.
    """

    def __init__(
        self,
        world: distributed.ProcessGroup,
        device: torch.device,
        *,
        with_other_rows: distributed.ProcessGroup | None = None,
    ) -> None:
        self._world = world
        self._device = device
        # Ranks that share their sequences count them once.
        self.process_group: distributed.ProcessGroup | None = with_other_rows or world

    def share(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Broadcast values from the first rank."""
        for parameter in parameters:
            distributed.broadcast(parameter.detach(), src=0, group=self._world)

    def reduce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """All-reduce the gradients in buckets, in the order of the parameters."""
        sum_gradients(parameters, self._world)

    def keep_once(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Empty the gradients on all ranks but the first."""
        if distributed.get_rank(self._world) != 0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def count_once(self, count: int) -> int:
        """The count on the first of the ranks with other rows."""
        return count if distributed.get_rank(self.process_group) == 0 else 0

    def with_experts(self, experts: SharedExperts) -> ReplicatedRanks:
        """The same ranks, once they share experts."""
        return ReplicatedWithExperts(self._world, self._device, experts, with_other_rows=self.process_group)

    def sum_over_ranks(self, count: int) -> int:
        """All-reduce a count."""
        total = torch.tensor(count, dtype=torch.int64, device=self._device)
        distributed.all_reduce(total, group=self.process_group)
        return int(total)

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_grad_norm: float, norm_type: float) -> float:
        """Clip them, of which every rank has all."""
        return float(clip_gradients(parameters, max_grad_norm, norm_type))


class ReplicatedWithExperts(ReplicatedRanks):
    """Every rank holds all weights but those of experts, whose gradients come from all ranks' tokens already."""

    def __init__(
        self,
        world: distributed.ProcessGroup,
        device: torch.device,
        experts: SharedExperts,
        *,
        with_other_rows: distributed.ProcessGroup | None,
    ) -> None:
        super().__init__(world, device, with_other_rows=with_other_rows)
        self._experts = experts

    def reduce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """All-reduce the gradients, those of experts over the ranks that have the same."""
        all_parameters = list(parameters)
        super().reduce(parameter for parameter in all_parameters if not is_spread(parameter))
        self._experts.reduce(parameter for parameter in all_parameters if is_spread(parameter))

    def keep_once(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Empty the gradients on all ranks but the first, those of experts on all but the first that has them."""
        all_parameters = list(parameters)
        super().keep_once(parameter for parameter in all_parameters if not is_spread(parameter))
        if not self._experts.is_first_copy:
            for parameter in all_parameters:
                if is_spread(parameter) and parameter.grad is not None:
                    parameter.grad.zero_()


class ShardedRanks(ReplicatedRanks):
    """FSDP2 has summed the gradients of every backward pass already; each rank holds its shard of the sum."""

    def reduce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """All-reduce the gradients of what FSDP has left whole."""
        super().reduce(parameter for parameter in parameters if not isinstance(parameter, DTensor))

    def keep_once(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Empty those of what FSDP has left whole on all ranks but the first."""
        super().keep_once(parameter for parameter in parameters if not isinstance(parameter, DTensor))

    def with_experts(self, experts: SharedExperts) -> ReplicatedRanks:
        """These: FSDP sums over the ranks that have an expert, too."""
        return self

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_grad_norm: float, norm_type: float) -> float:
        """Clip them by the norm over all shards."""
        norm = clip_gradients(parameters, max_grad_norm, norm_type)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def sync_of(mesh: DeviceMesh | None, device: torch.device) -> GradientSync:
    """What the ranks of a mesh that all hold the whole model tell each other.

    Raises:
        ConfigError: The mesh does more than data parallelism, or the processes were not started together.
    """
    if mesh is None or mesh.world_size == 1:
        return OneRank()
    mesh.require_data_axes(
        "MultiLoraTransformersModel", model_parallel="MultiLoraMegatronModel", one_adapter="TransformersModel"
    )
    if mesh.size("fsdp") > 1:
        log.warning("model.mesh.replicated", fsdp_size=mesh.size("fsdp"), next="every rank holds the whole base model")
    return ReplicatedRanks(data_group(mesh), device)


def data_group(mesh: DeviceMesh) -> distributed.ProcessGroup:
    """The process group of all ranks of a mesh, which is the world."""
    if not distributed.is_initialized():
        raise ConfigError("device_mesh: the processes have not met; call twinkle.initialize(mode='local') first")
    if distributed.get_world_size() != mesh.world_size:
        raise ConfigError(
            f"device_mesh: has {mesh.world_size} ranks, but {distributed.get_world_size()} processes were started"
        )
    world = distributed.group.WORLD
    assert world is not None
    return world


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_grad_norm: float, norm_type: float) -> torch.Tensor:
    """Torch's ``clip_grad_norm_``, also for gradients that lie on several meshes; the norm before clipping."""
    by_mesh: dict[object, list[torch.Tensor]] = {}
    present = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in present:
        gradient = parameter.grad
        assert gradient is not None
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    if len(by_mesh) < 2:
        return torch.nn.utils.clip_grad_norm_(present, max_grad_norm, norm_type)
    norms = [whole(torch.nn.utils.get_total_norm(gradients, norm_type)) for gradients in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    share = min(1.0, max_grad_norm / (float(total) + CLIP_EPSILON))
    for gradients in by_mesh.values():
        for gradient in gradients:
            gradient.mul_(share)
    return total


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: distributed.ProcessGroup) -> None:
    """All-reduce the gradients over a group, in buckets, in the order of the parameters."""
    for bucket in _buckets(parameters):
        flat = _flatten_dense_tensors(bucket)
        distributed.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(summed)


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size_bytes = 0
    for parameter in parameters:
        # Ranks must send the same buckets, also where a parameter took no part on one of them.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if bucket and (size_bytes + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(gradient)
        size_bytes += gradient.nbytes
    if bucket:
        yield bucket
