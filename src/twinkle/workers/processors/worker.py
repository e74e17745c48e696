"""The worker of processors: claims their operations by lease, has each done by a process, commits what came of it.

The answer to a call and the recipe of the processor's state after it are one commit: whoever dies before that has done
nothing, and whoever comes after it goes on behind it. So a batch is neither lost nor given twice.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import LeaseLost, StatementFailed, StorageUnavailable, UserError
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, Failure, FailureCategory, Outcome, Payload
from twinkle.core.process.background import say_if_it_ends
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.fairness import in_service_order, with_virtual_time
from twinkle.scheduler.retry import Retry, decide
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.records import Records
from twinkle.storage.journal.turns import Head
from twinkle.storage.payloads import write_result
from twinkle.storage.processors.progress import ProcessorProgress
from twinkle.storage.stores import Stores
from twinkle.workers.endings import facts_of
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.processors.assembling import Assembler
from twinkle.workers.processors.children import Child, Children
from twinkle.workers.processors.orders import ITERATOR_EXHAUSTED, Done, Order, Refused, Unknown
from twinkle.workers.report import OperationReporter

_HEADS_OFFERED = 64
_RETRY_S = 0.5
_CHARGE_PER_S = 100
"""What a second of a process counts for in fair share, beside the one of each call."""

T = TypeVar("T")

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ProcessorParts:
    """What the worker is made of."""

    stores: Stores
    blobs: BlobStore
    keeper: LeaseKeeper
    assembler: Assembler
    children: Children
    publisher: CompletionPublisher
    reporter: OperationReporter
    clock: Clock
    inline_bytes: int
    max_attempts: int
    sweep_s: float


@dataclass(frozen=True)
class _Outcome:
    """What came of a call, and where its processor stands from now on."""

    outcome: Outcome
    progress: ProcessorProgress | None
    facts: Mapping[str, object] = field(default_factory=dict)
    """What the log says of a failure beside what failed and why."""


class ProcessorWorker:
    """Does the calls of all processors. Lives on one event loop; what blocks runs in threads."""

    def __init__(self, parts: ProcessorParts) -> None:
        self._parts = parts
        self._journal = parts.stores.journal
        self._rung = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._epoch = 0
        self._stopping = False

    def ring(self) -> None:
        """Something new waits: look into the journal now. Call it on the loop."""
        self._rung.set()

    async def run(self) -> None:
        """Work until :meth:`stop`. The mesh is taken when there is something to do, and not before."""
        while not self._stopping:
            self._rung.clear()
            try:
                await self._look()
                await self._parts.children.end_idle()
            except StorageUnavailable as error:
                _log.warning("processors.storage_unavailable", error=error.message)
            except LeaseLost as error:
                self._drop(error)
            except Exception as error:  # noqa: BLE001 - the border: without this loop nobody would look again
                _log.error("processors.look_failed", error=str(error), next="the next look goes on", exc_info=error)
            if not self._stopping:
                await self._until_rung()

    async def stop(self) -> None:
        """Let go of everything: what is under way goes back to the journal, and no attempt is used up."""
        self._stopping = True
        self._rung.set()
        lease, request_ids = self._parts.keeper.current(), list(self._tasks)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if lease is not None and request_ids:
            try:
                await asyncio.to_thread(partial(self._journal.give_back, lease, request_ids, is_blameless=True))
            except (LeaseLost, StorageUnavailable) as error:
                _log.warning("processors.give_back_failed", error=error.message, next="the next holder takes them")

    async def _until_rung(self) -> None:
        try:
            async with asyncio.timeout(self._parts.sweep_s):
                await self._rung.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        """Claim what processes that are free may do."""
        lease = await self._lease()
        if lease is None:
            return
        if lease.epoch != self._epoch:
            # What was in our hands in an earlier epoch is somebody else's, and so is where its processors stand.
            self._forget()
            self._epoch = lease.epoch
        taken: dict[str, Child] = {}
        choose = with_virtual_time(partial(self._choose, taken))
        under_way = {request_id.rpartition(":req:")[0] for request_id in self._tasks}
        claims = await asyncio.to_thread(partial(self._journal.claim, lease, choose, _HEADS_OFFERED, held=under_way))
        crash_point("processors.claimed")
        self._parts.reporter.started(claims)
        for claim in claims:
            child = taken[claim.lane]
            child.is_busy = True
            task = asyncio.create_task(self._answer(lease, claim, child), name=claim.request_id)
            say_if_it_ends(task)
            self._tasks[claim.request_id] = task

    async def _lease(self) -> Lease | None:
        keeper = self._parts.keeper
        if keeper.current() is not None:
            return keeper.current()
        if not await asyncio.to_thread(self._parts.stores.processors.has_waiting):
            return None
        return await asyncio.to_thread(keeper.try_acquire)

    def _choose(self, taken: dict[str, Child], heads: list[Head]) -> list[Head]:
        """One call for each process that is free, in the order of the tenants' turns."""
        chosen = []
        for tagged in in_service_order(heads):
            child = self._parts.children.free_for(tagged.head.turn.tenant)
            if child is not None and child not in taken.values():
                taken[tagged.head.lane] = child
                chosen.append(tagged.head)
        return chosen

    async def _answer(self, lease: Lease, claim: Claim, child: Child) -> None:
        """Do a call and commit it; whatever comes between is the next attempt's."""
        began_s, began_at = time.monotonic(), self._parts.clock.now()
        try:
            found = await self._done(claim, child, began_s)
            if isinstance(found, Retry):
                await self._give_back(lease, claim, found)
            else:
                await self._commit(lease, claim, found, began_at)
        except LeaseLost as error:
            self._drop(error)
        except StorageUnavailable as error:
            _log.warning("processors.not_committed", op=claim.request_id, error=error.message, next="claimed again")
        finally:
            self._tasks.pop(claim.request_id, None)
            child.is_busy = False
            self._rung.set()

    async def _done(self, claim: Claim, child: Child, began_s: float) -> _Outcome | Retry:
        try:
            if claim.suspicions >= self._parts.max_attempts:
                raise _Poisonous(
                    f"the process died during each of {self._parts.max_attempts} attempts at this call, perhaps for"
                    " lack of memory"
                )
            order = await asyncio.to_thread(self._parts.assembler.order, claim)
            answer = await self._parts.children.perform(child, order)
            if isinstance(answer, Unknown):
                order = await asyncio.to_thread(self._parts.assembler.with_scripts, order, claim)
                answer = await self._parts.children.perform(child, order)
            assert not isinstance(answer, Unknown), "scripts make everything"
            crash_point("processors.done")
            return await self._ended(claim, order, answer, time.monotonic() - began_s)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the border: whatever it is, it is this call's
            return self._failed(claim, error)

    async def _ended(self, claim: Claim, order: Order, answer: Done | Refused, took_s: float) -> _Outcome:
        charge = 1 + round(took_s * _CHARGE_PER_S)
        progress = ProcessorProgress(
            processor=claim.lane,
            seq=claim.seq,
            recipe=answer.recipe.model_dump_json(),
            uses=tuple(answer.recipe.uses),
        )
        if isinstance(answer, Refused):
            failure = Failure(message=answer.message, category=FailureCategory.USER, code=answer.code)
            facts = {"method": order.step.method}
            return _Outcome(_outcome(claim, failure=failure, charge=charge), progress, facts)
        write = partial(
            write_result,
            self._parts.blobs,
            claim.request_id,
            answer.result,
            inline_bytes=self._parts.inline_bytes,
            now=self._parts.clock.now(),
        )
        return _Outcome(_outcome(claim, result=await asyncio.to_thread(write), charge=charge), progress)

    def _failed(self, claim: Claim, error: Exception) -> _Outcome | Retry:
        incident = secrets.token_hex(4)
        verdict = decide(error, attempt=claim.attempt, max_attempts=self._parts.max_attempts, incident=incident)
        if isinstance(verdict, Retry):
            _log.warning("operation.postponed", op=claim.request_id, error=str(error), delay_s=verdict.delay_s)
            return verdict
        unexpected = None if isinstance(error, UserError) else error
        return _Outcome(_outcome(claim, failure=verdict), None, {"incident": incident, "exc_info": unexpected})

    async def _commit(self, lease: Lease, claim: Claim, found: _Outcome, began_at: float) -> None:
        """Record it however long the database stays away, as long as the lease is ours."""
        records = {claim.request_id: Records(progress=[] if found.progress is None else [found.progress])}
        commit = partial(self._journal.commit, lease, [found.outcome], records)
        try:
            committed = await self._patiently(lease, commit)
        except StatementFailed as error:
            # The journal will never take it: as a failure it ends, or it would stay claimed for ever.
            failed = self._failed(claim, error)
            assert isinstance(failed, _Outcome), "what is refused for good is not tried again"
            found = failed
            committed = await self._patiently(lease, partial(self._journal.commit, lease, [found.outcome]))
        crash_point("processors.committed")
        _tell_of_failure(claim, found)
        if claim.seq == 0 and found.outcome.failure is not None:
            # What was never made is not counted among what its tenant has.
            await self._patiently(lease, partial(self._parts.stores.processors.forget, claim.lane))
        await asyncio.to_thread(
            self._parts.publisher.publish,
            [outcome.request_id for outcome in (*committed.recorded, *committed.ended_before)],
        )
        self._parts.reporter.ended(committed.recorded, began_at)

    async def _patiently(self, lease: Lease, write: Callable[[], T]) -> T:
        while True:
            try:
                return await asyncio.to_thread(write)
            except StorageUnavailable as error:
                if self._parts.keeper.current() is not lease:
                    raise LeaseLost(f"mesh {lease.mesh}: epoch {lease.epoch} has ended", mesh=lease.mesh) from error
                _log.warning("processors.commit_postponed", error=error.message, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def _give_back(self, lease: Lease, claim: Claim, retry: Retry) -> None:
        give_back = partial(
            self._journal.give_back,
            lease,
            [claim.request_id],
            delay_s=retry.delay_s,
            is_suspect=retry.is_suspect,
            reason=retry.reason,
        )
        await self._patiently(lease, give_back)
        self._parts.reporter.retried(claim, retry.reason)

    def _drop(self, error: LeaseLost) -> None:
        _log.warning("processors.fenced", error=error.message)
        self._parts.keeper.give_up()
        self._forget()

    def _forget(self) -> None:
        """Leave what is under way: it is claimed by whoever holds the mesh."""
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()


class _Poisonous(UserError):
    """A call that took its process down too often."""

    code = "poison"


def _tell_of_failure(claim: Claim, found: _Outcome) -> None:
    """As of every failed operation, one line; that a data set has no more rows is no warning."""
    failure = found.outcome.failure
    if failure is not None:
        tell = _log.info if failure.code == ITERATOR_EXHAUSTED else _log.warning
        reason = {"reason": failure.code, "category": failure.category.value}
        tell("operation.failed", **facts_of(claim), **reason, **found.facts)


def _outcome(
    claim: Claim, *, result: Payload | None = None, failure: Failure | None = None, charge: int = 1
) -> Outcome:
    return Outcome(
        request_id=claim.request_id,
        lane=claim.lane,
        seq=claim.seq,
        kind=claim.kind,
        result=result,
        failure=failure,
        charge=charge,
    )
