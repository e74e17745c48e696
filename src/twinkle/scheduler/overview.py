"""A mesh's queue at a glance, tenant by tenant: who waits with how much, and who was served."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from twinkle.scheduler.standing import measured_rate
from twinkle.storage.journal.queues import MeshQueue


@dataclass(frozen=True, kw_only=True)
class TenantLine:
    """One tenant on one mesh. ``share`` is its part of the tokens served lately, of all tenants'."""

    tenant: str
    weight: float
    num_adapters_waiting: int
    num_operations: int
    num_samples: int
    num_running: int
    tokens_waiting: int
    share: float
    paused_for_s: float


@dataclass(frozen=True, kw_only=True)
class MeshOverview:
    """One mesh. The rates are tokens per second over the times in which it was busy lately.

    Where ``is_exact`` is false the counts of samples and tokens are lower bounds: not all of the queue was looked at.
    """

    mesh: str
    training_rate: float | None
    sampling_rate: float | None
    is_exact: bool
    tenants: list[TenantLine]


def overview_of(queue: MeshQueue, *, now: float) -> MeshOverview:
    """Count a queue, the tenant with most tokens waiting first."""
    adapters, operations, samples = Counter[str](), Counter[str](), Counter[str]()
    tokens, served, running = Counter[str](), Counter[str](), Counter[str]()
    for lane in queue.lanes.values():
        adapters[lane.tenant] += 1
        operations[lane.tenant] += lane.max_seq - lane.head_seq + 1
    for head in queue.samples:
        samples[head.turn.tenant] += 1
    for head in (*queue.training, *queue.samples):
        tokens[head.turn.tenant] += head.num_tokens
    for tenant in queue.running.values():
        running[tenant] += 1
    for ended in queue.recent:
        served[ended.tenant] += ended.num_tokens
    lines = [
        TenantLine(
            tenant=known.name,
            weight=known.weight,
            num_adapters_waiting=adapters[tenant],
            num_operations=operations[tenant],
            num_samples=samples[tenant],
            num_running=running[tenant],
            tokens_waiting=tokens[tenant],
            share=served[tenant] / served.total() if served.total() else 0.0,
            paused_for_s=max(known.paused_until - now, 0.0),
        )
        for tenant, known in queue.tenants.items()
    ]
    return MeshOverview(
        mesh=queue.mesh,
        training_rate=measured_rate(ended for ended in queue.recent if not ended.is_sample),
        sampling_rate=measured_rate(ended for ended in queue.recent if ended.is_sample),
        is_exact=queue.is_complete and not queue.cut_lanes,
        tenants=sorted(lines, key=lambda line: (-line.tokens_waiting, line.tenant)),
    )
