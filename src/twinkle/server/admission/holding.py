"""What a tenant may have lying here: sessions, runs, samplers, operations, checkpoints. Counted every few seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from twinkle.core.clock import Clock
from twinkle.core.errors import LimitReached, Overloaded, TwinkleError
from twinkle.core.limits import TenantLimits
from twinkle.core.operation import OperationKind, Submission, Unnumbered
from twinkle.server.admission.quota import Quotas
from twinkle.server.threads import Shared, Threads
from twinkle.storage.tenants.holdings import Held, Holdings

_IsFull: TypeAlias = Callable[[Held], bool]
_RECOUNT_S = 5.0
_RECOUNT_AT_LIMIT_S = 0.25
_KEEPS = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD, OperationKind.SAMPLE, OperationKind.CALL})
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
        self._counts = Shared[_Known]()

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
                f"you have {held.num_runs} training runs, and {most} may be; go on with one of them, unload others and"
                " delete their checkpoints (they go after a while), or ask the operator for more (max_runs)"
            )
        held.num_runs += 1

    async def take_sampler(self, tenant: str) -> None:
        """Count one more sampling session that no operation opens.

        Raises:
            LimitReached: The tenant has as many as it may have.
        """
        rules = _rules_of_samplers((await self._quotas.account(tenant)).limits)
        held = await self._unbroken(tenant, rules)
        held.num_sampling_sessions += 1

    async def take_checkpoint(self, tenant: str, size_bytes: int) -> None:
        """Count one more checkpoint that no operation saves.

        Raises:
            LimitReached: The tenant has as many, or as large ones, as it may have.
        """
        rules = _rules_of_saves((await self._quotas.account(tenant)).limits)
        held = await self._unbroken(tenant, rules)
        held.num_checkpoints += 1
        held.checkpoint_bytes += size_bytes

    async def admit(self, submission: Submission | Unnumbered) -> None:
        """Count one more operation on its way into the journal.

        Raises:
            Overloaded: Too many of the tenant's operations, or of their bytes, wait already.
            LimitReached: It would save a checkpoint, and the tenant has as many, or as large ones, as it may have; it
                would open a sampling session, and the tenant has as many as it may have; or its payload would be kept,
                and what is kept of the tenant is as much as it may be.
        """
        limits = (await self._quotas.account(submission.tenant)).limits
        held = await self._unbroken(submission.tenant, _rules_of(limits, submission))
        held.num_open += 1
        held.open_bytes += submission.payload.size_bytes
        held.num_sampling_sessions += submission.opens_sampler

    def forget(self) -> None:
        """Count everything anew when it is next asked."""
        self._known = {}

    async def _unbroken(self, tenant: str, rules: Sequence[_Rule]) -> Held:
        """What the tenant has, if that breaks none of these rules; else raises the refusal of the first."""
        held = await self._held(tenant, lambda held: any(rule.is_broken(held) for rule in rules))
        for rule in rules:
            if rule.is_broken(held):
                raise rule.refusal(held)
        return held

    async def _held(self, tenant: str, is_full: _IsFull) -> Held:
        """What was counted lately, and counted anew sooner where that would be a refusal."""
        known = self._known.get(tenant)
        now = self._clock.now()
        if known is None or now - known.counted_at > (_RECOUNT_AT_LIMIT_S if is_full(known.held) else _RECOUNT_S):
            known = await self._counts.get(tenant, partial(self._count, tenant))
        return known.held

    async def _count(self, tenant: str) -> _Known:
        now = self._clock.now()
        known = self._known[tenant] = _Known(await self._threads.run(self._holdings.of, tenant), now)
        return known


@dataclass(frozen=True)
class _Rule:
    """When an operation is not let in, and what its owner is told."""

    is_broken: _IsFull
    refusal: Callable[[Held], TwinkleError]


def _rules_of(limits: TenantLimits, submission: Submission | Unnumbered) -> list[_Rule]:
    rules = []
    if most := limits.max_queued:
        rules.append(
            _Rule(
                lambda held: held.num_open >= most,
                lambda held: Overloaded(f"{held.num_open} operations wait or run already, and {most} may; come again"),
            )
        )
    if most_bytes := limits.max_queued_bytes:
        rules.append(
            _Rule(
                # One alone always may.
                lambda held: held.num_open > 0 and held.open_bytes + submission.payload.size_bytes > most_bytes,
                lambda held: Overloaded(
                    f"operations that wait or run hold {held.open_bytes} bytes, and {most_bytes} may be; come again"
                    " when some have ended"
                ),
            )
        )
    if submission.opens_sampler:
        rules += _rules_of_samplers(limits)
    elif submission.kind in _SAVES:
        rules += _rules_of_saves(limits)
    if submission.kind in _KEEPS and limits.max_kept_bytes:
        rules.append(_rule_of_keeping(limits.max_kept_bytes))
    return rules


def _rule_of_keeping(most_bytes: int) -> _Rule:
    return _Rule(
        lambda held: held.kept_bytes >= most_bytes,
        lambda held: LimitReached(
            f"what your runs are rebuilt from, recovery points and payloads, and what your samples were sent with, has"
            f" {held.kept_bytes} bytes, and {most_bytes} may be; unload runs that you have done with (unload_model;"
            " their checkpoints stay), wait until the past of others has had its time, or ask the operator for more"
            " (max_kept_bytes)"
        ),
    )


def _rules_of_samplers(limits: TenantLimits) -> list[_Rule]:
    most = limits.max_sampling_sessions
    if not most:
        return []
    return [
        _Rule(
            lambda held: held.num_sampling_sessions >= most,
            lambda held: LimitReached(
                f"you have {held.num_sampling_sessions} sampling sessions, and {most} may be; finish sessions whose"
                " clients are done and delete checkpoints that nobody samples from (theirs go after a while), or ask"
                " the operator for more (max_sampling_sessions)"
            ),
        )
    ]


def _rules_of_saves(limits: TenantLimits) -> list[_Rule]:
    rules = []
    if most := limits.max_checkpoints:
        rules.append(
            _Rule(
                lambda held: held.num_checkpoints >= most,
                lambda held: LimitReached(
                    f"you have {held.num_checkpoints} checkpoints, and {most} may be; delete some, give others an end"
                    " (ttl_seconds), or ask the operator for more (max_checkpoints)"
                ),
            )
        )
    if most_bytes := limits.max_checkpoint_bytes:
        rules.append(
            _Rule(
                lambda held: held.checkpoint_bytes >= most_bytes,
                lambda held: LimitReached(
                    f"your checkpoints have {held.checkpoint_bytes} bytes, and {most_bytes} may be; delete some, give"
                    " others an end (ttl_seconds), or ask the operator for more (max_checkpoint_bytes)"
                ),
            )
        )
    return rules
