"""Whose jobs begin next: tenants take turns by their weights, whoever submitted first or most.

A tenant's turn is due by how many of its jobs are under way, with the next one, divided by its weight: the lowest goes
first, and where that is equal whose job has waited longest. Within a tenant the lowest ``nice`` goes first, then the
oldest. No more of a tenant run at once than its limit lets, and no more members of one parent than that says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinkle.core.job import JobKind, JobState


@dataclass(frozen=True, kw_only=True)
class ReadyJob:
    """A job that a runner may take up now, and what Celery's monitors are to see of its next attempt."""

    id: str
    tenant: str
    kind: JobKind
    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A job that could begin: its place among its tenant's, and what holds it beside them."""

    id: str
    kind: JobKind
    state: JobState
    attempt: int
    parent: str | None
    at_once: int | None
    created_at: float

    def ready(self, tenant: str) -> ReadyJob:
        """As it is handed out."""
        is_retry = self.state is JobState.RETRYING
        return ReadyJob(
            id=self.id,
            tenant=tenant,
            kind=self.kind,
            attempt=self.attempt + (1 if is_retry or self.attempt == 0 else 0),
            reason="retry" if is_retry else "resumed" if self.attempt else "submitted",
        )


@dataclass(kw_only=True)
class JobTurn:
    """A tenant with jobs that could begin. ``members`` counts those of each parent that are under way."""

    tenant: str
    weight: float
    max_running: int
    num_running: int
    members: Counter[str] = field(default_factory=Counter)

    @property
    def has_room(self) -> bool:
        """Whether one more of its jobs may run."""
        return not self.max_running or self.num_running < self.max_running

    @property
    def due(self) -> float:
        """How far it is with the next one; the lowest is served first."""
        return (self.num_running + 1) / self.weight

    def holds(self, candidate: Candidate) -> bool:
        """Whether as many members of the candidate's parent are under way as may be."""
        if candidate.parent is None or candidate.at_once is None:
            return False
        return self.members[candidate.parent] >= candidate.at_once

    def take(self, candidate: Candidate) -> None:
        """Count one more under way."""
        self.num_running += 1
        if candidate.parent is not None:
            self.members[candidate.parent] += 1


Offer = Callable[[JobTurn, frozenset[str], int], Sequence[Candidate]]
"""The next jobs of a tenant in their order, none of these parents' members, at most so many."""


def choose(turns: Sequence[JobTurn], offer: Offer, *, num_free: int) -> list[ReadyJob]:
    """As many of the jobs that could begin as there are free places, in the order in which they are served."""
    queues = {turn.tenant: _Queue(turn, offer, num_free) for turn in turns if turn.has_room}
    chosen: list[ReadyJob] = []
    while queues and len(chosen) < num_free:
        heads = {tenant: queue.head() for tenant, queue in queues.items()}
        queues = {tenant: queue for tenant, queue in queues.items() if heads[tenant] is not None}
        due = [
            (queue.turn.due, head.created_at, tenant, head)
            for tenant, queue in queues.items()
            if (head := heads[tenant]) is not None
        ]
        if not due:
            break
        *_, tenant, head = min(due, key=lambda one: one[:3])
        chosen.append(head.ready(tenant))
        queues[tenant].take()
        if not queues[tenant].turn.has_room:
            del queues[tenant]
    return chosen


class _Queue:
    """One tenant's jobs in their order, read a few at a time; members of a parent that is full are passed over."""

    def __init__(self, turn: JobTurn, offer: Offer, size: int) -> None:
        self.turn = turn
        self._offer = offer
        self._size = size
        self._read: list[Candidate] | None = None
        self._seen: set[str] = set()
        self._full: set[str] = set()

    def head(self) -> Candidate | None:
        """The next one that may begin."""
        while True:
            if not self._read:
                found = self._offer(self.turn, frozenset(self._full), self._size + len(self._seen))
                self._read = [one for one in found if one.id not in self._seen]
                if not self._read:
                    return None
            head = self._read[0]
            if not self.turn.holds(head):
                return head
            assert head.parent is not None, "only members are held"
            self._full.add(head.parent)
            self._read = [one for one in self._read if one.parent != head.parent]

    def take(self) -> None:
        """The head is handed out."""
        assert self._read, "whoever takes the head has looked at it"
        head = self._read.pop(0)
        self._seen.add(head.id)
        self.turn.take(head)
