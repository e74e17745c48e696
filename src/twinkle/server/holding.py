"""What a tenant may have lying here: sessions, runs, waiting operations, checkpoints. Counted every few seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from twinkle.core.clock import Clock
from twinkle.core.errors import LimitReached, Overloaded
from twinkle.core.operation import OperationKind, Submission, Unnumbered
from twinkle.server.quota import Quotas
from twinkle.server.threads import Threads
from twinkle.storage.tenants.holdings import Held, Holdings

_IsFull: TypeAlias = Callable[[Held], bool]
_RECOUNT_S = 5.0
_RECOUNT_AT_LIMIT_S = 0.25
_SAVES = frozenset(
    {OperationKind.SAVE_WEIGHTS, OperationKind.SAVE_WEIGHTS_FOR_SAMPLER, OperationKind.SAVE_WEIGHTS_EXTERNAL}
)


@dataclass
class _Known:
    held: Held
    counted_at: float


class HoldingLimits:
    """Refuses what a tenant has no room for, and says what to delete. Lives on one event loop."""

    def __init__(self, holdings: Holdings, quotas: Quotas, clock: Clock, threads: Threads) -> None:
        self._holdings = holdings
        self._quotas = quotas
        self._clock = clock
        self._threads = threads
        self._known: dict[str, _Known] = {}

    async def take_session(self, tenant: str) -> None:
        """Count one more session.

        Raises:
            LimitReached: The tenant has as many as it may have.
        """
        most = (await self._quotas.account(tenant)).limits.max_sessions
        held = await self._held(tenant, lambda held: bool(most) and held.num_sessions >= most)
        if most and held.num_sessions >= most:
            raise LimitReached(
                f"you have {held.num_sessions} sessions, and {most} may be; those that have ended and made nothing go"
                " by themselves after a while, or ask the operator for more (max_sessions)"
            )
        held.num_sessions += 1

    async def take_run(self, tenant: str) -> None:
        """Count one more training run, or copy of a checkpoint, which is one too.

        Raises:
            LimitReached: The tenant has as many as it may have.
        """
        most = (await self._quotas.account(tenant)).limits.max_runs
        held = await self._held(tenant, lambda held: bool(most) and held.num_runs >= most)
        if most and held.num_runs >= most:
            raise LimitReached(
                f"you have {held.num_runs} training runs, and {most} may be; go on with one of them, or ask the"
                " operator for more (max_runs)"
            )
        held.num_runs += 1

    async def admit(self, submission: Submission | Unnumbered) -> None:
        """Count one more operation on its way into the journal.

        Raises:
            Overloaded: Too many of the tenant's operations, or of their bytes, wait already.
            LimitReached: It would save a checkpoint, and the tenant has as many, or as large ones, as it may have.
        """
        tenant, size_bytes = submission.tenant, submission.payload.size_bytes
        limits = (await self._quotas.account(tenant)).limits
        is_save = submission.kind in _SAVES

        def is_full(held: Held) -> bool:
            return bool(
                (limits.max_queued and held.num_open >= limits.max_queued)
                or (limits.max_queued_bytes and held.open_bytes + size_bytes > limits.max_queued_bytes)
                or (is_save and limits.max_checkpoints and held.num_checkpoints >= limits.max_checkpoints)
                or (is_save and limits.max_checkpoint_bytes and held.checkpoint_bytes >= limits.max_checkpoint_bytes)
            )

        held = await self._held(tenant, is_full)
        if limits.max_queued and held.num_open >= limits.max_queued:
            raise Overloaded(f"{held.num_open} operations wait or run already, and {limits.max_queued} may; come again")
        if limits.max_queued_bytes and held.num_open and held.open_bytes + size_bytes > limits.max_queued_bytes:
            raise Overloaded(
                f"operations that wait or run hold {held.open_bytes} bytes, and {limits.max_queued_bytes} may be; come"
                " again when some have ended"
            )
        if is_save and limits.max_checkpoints and held.num_checkpoints >= limits.max_checkpoints:
            raise LimitReached(
                f"you have {held.num_checkpoints} checkpoints, and {limits.max_checkpoints} may be; delete some, give"
                " others an end (ttl_seconds), or ask the operator for more (max_checkpoints)"
            )
        if is_save and limits.max_checkpoint_bytes and held.checkpoint_bytes >= limits.max_checkpoint_bytes:
            raise LimitReached(
                f"your checkpoints have {held.checkpoint_bytes} bytes, and {limits.max_checkpoint_bytes} may be; delete"
                " some, give others an end (ttl_seconds), or ask the operator for more (max_checkpoint_bytes)"
            )
        held.num_open += 1
        held.open_bytes += size_bytes

    def forget(self) -> None:
        """Count everything anew when it is next asked."""
        self._known = {}

    async def _held(self, tenant: str, is_full: _IsFull) -> Held:
        """What was counted lately, and counted anew sooner where that would be a refusal."""
        known = self._known.get(tenant)
        now = self._clock.now()
        if known is None or now - known.counted_at > (_RECOUNT_AT_LIMIT_S if is_full(known.held) else _RECOUNT_S):
            known = _Known(await self._threads.run(self._holdings.of, tenant), now)
            self._known[tenant] = known
        return known.held
