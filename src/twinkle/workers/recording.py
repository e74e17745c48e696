"""What has ended is recorded first, then told: beside the device, on the clerk's thread."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeAlias

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import LeaseLost, StatementFailed, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Failure, FailureCategory, Outcome, Payload
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.storage.journal.executing import Committed
from twinkle.storage.journal.journal import Journal
from twinkle.wire.training_result import encode_forward_backward_output
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.endings import Endings, Execution, facts_of
from twinkle.workers.engine import State
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.report import OperationReporter

Half: TypeAlias = Literal["worker", "sampler"]
"""Of the step loop: trains, or samples. Crash points are named after them."""

_COMMIT_RETRY_S = 0.5

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the journal has taken of an execution; ``spoilt`` are lanes in which memory and journal differ now."""

    execution: Execution
    committed: Committed
    spoilt: frozenset[str] = frozenset()


class Recorder(Generic[State]):
    """Brings what has ended into the journal, and then to those who wait for it; memory follows the journal."""

    def __init__(
        self,
        *,
        journal: Journal,
        keeper: LeaseKeeper,
        residents: Residents[State],
        endings: Endings,
        publisher: CompletionPublisher,
        reporter: OperationReporter,
        clock: Clock,
        teller: Threads,
    ) -> None:
        self._journal = journal
        self._teller = teller
        self._keeper = keeper
        self._residents = residents
        self._endings = endings
        self._publisher = publisher
        self._reporter = reporter
        self._clock = clock
        self._is_patient = True
        self._spoilt: set[str] = set()
        """Lanes of which an outcome was not taken, and the step loop does not know yet."""

    def lose_patience(self) -> None:
        """Wait for a database that is away no more: the worker is to end."""
        self._is_patient = False

    def record(self, lease: Lease, execution: Execution, *, half: Half, aside: bool = False) -> Recorded:
        """Commit the outcomes under the lease, tell of them, and give back what is to be tried again.

        Runs on the clerk's thread, execution after execution as they came from the device: what followed on an outcome
        that was not taken goes back to the journal, until :meth:`note` has said so to the step loop. Where the device
        is at work (``aside``), what is next to be written does not wait for the broker.

        Raises:
            LeaseLost: Another epoch holds the mesh, as far as the journal or the keeper knows.
            StorageUnavailable: The database is away and the worker is to end; whoever is next does the work again.
        """
        self._hold_back(execution)
        committed, spoilt = Committed(), self._write_results(execution)
        self._spoilt |= spoilt
        if execution.outcomes:
            crash_point(f"{half}.executed")
            committed, untaken = self._commit(lease, execution)
            spoilt |= untaken
            self._spoilt |= spoilt
            crash_point(f"{half}.committed")
            if aside:
                self._teller.submit(self._tell, committed, execution, half).add_done_callback(_log_untold)
            else:
                self._tell(committed, execution, half)
        self._give_back(lease, execution)
        return Recorded(execution=execution, committed=committed, spoilt=frozenset(spoilt))

    def note(self, recorded: Recorded) -> None:
        """Let memory follow the journal. On the step loop's thread."""
        crash_point("worker.noting")
        for outcome in recorded.committed.recorded:
            claim, _ = recorded.execution.begun[outcome.request_id]
            self._residents.note_applied(outcome.lane, outcome.seq, num_bytes=claim.payload.size_bytes)
        for lane in recorded.spoilt:
            self._residents.forget(lane)

    def cure(self, lanes: Collection[str]) -> None:
        """Nothing follows any more on what was not taken: take what is done with these lanes from now on."""
        self._spoilt -= set(lanes)

    def forget_all(self) -> None:
        """All memory is gone, and whatever was made of it."""
        self._spoilt.clear()

    def _write_results(self, execution: Execution) -> set[str]:
        """Bring into wire form what is not yet; the lanes in which that failed. What followed on it there goes back."""
        unwritten, execution.unwritten = execution.unwritten, {}
        failures: list[tuple[Outcome, Exception]] = []
        for place, outcome in enumerate(execution.outcomes) if unwritten else ():
            result = unwritten.get(outcome.request_id)
            if result is None:
                continue
            try:
                content = encode_forward_backward_output(result)
            except Exception as error:  # noqa: BLE001 - the border: whatever it is, it is this operation's
                failures.append((outcome, error))
            else:
                execution.outcomes[place] = replace(outcome, result=Payload(inline=content))
        failed = set[str]()
        for outcome, reason in failures:
            if outcome.lane not in failed:
                failed.add(outcome.lane)
                self._fail_unwritten(execution, outcome, reason)
        return failed

    def _fail_unwritten(self, execution: Execution, outcome: Outcome, error: Exception) -> None:
        behind = execution.outcomes[execution.outcomes.index(outcome) + 1 :]
        _take_back(execution, [each for each in behind if each.lane == outcome.lane])
        claim, _ = execution.begun[outcome.request_id]
        execution.outcomes.remove(outcome)
        execution.records.pop(outcome.request_id, None)
        self._endings.fail(execution, claim, error)

    def _hold_back(self, execution: Execution) -> None:
        """Take out what was made of a state that the journal does not know."""
        _take_back(execution, [each for each in execution.outcomes if each.lane in self._spoilt])

    def _give_back(self, lease: Lease, execution: Execution) -> None:
        """What we do not hold any more is claimed again, also where the journal did not hear that it goes back."""
        try:
            for postponed in execution.postponed:
                retry = postponed.retry
                self._journal.give_back(
                    lease,
                    [postponed.claim.request_id],
                    delay_s=retry.delay_s,
                    is_suspect=retry.is_suspect,
                    reason=retry.reason,
                )
                self._reporter.retried(postponed.claim, retry.reason)
            self._journal.give_back(lease, [claim.request_id for claim in execution.returned], is_unbegun=True)
        except StorageUnavailable as error:
            _log.warning("operation.not_given_back", error=error.message, next="it is claimed again at once")

    def _commit(self, lease: Lease, execution: Execution) -> tuple[Committed, set[str]]:
        """Record outcomes; those that the journal will never take end as failures, or they would be tried for ever.

        It may be what came of one adapter that it does not take: then each is recorded apart, the others' unharmed.
        """
        spoilt: set[str] = set()
        try:
            committed = self._commit_patiently(lease, execution, execution.outcomes)
        except StatementFailed as error:
            committed = Committed()
            parts = _parts_of(execution.outcomes)
            for part in parts:
                taken, is_condemned = self._commit_part(lease, execution, part, error if len(parts) == 1 else None)
                committed.add(taken)
                if is_condemned:
                    spoilt.add(part[0].lane)
        return committed, spoilt | self._untaken(committed, execution)

    def _commit_part(
        self, lease: Lease, execution: Execution, part: list[Outcome], refused: StatementFailed | None
    ) -> tuple[Committed, bool]:
        """Record some, as failures where they were ``refused`` or are now; whether they were."""
        if refused is None:
            try:
                return self._commit_patiently(lease, execution, part), False
            except StatementFailed as error:
                refused = error
        return self._commit_patiently(lease, execution, _condemn(execution, part, refused)), True

    def _commit_patiently(self, lease: Lease, execution: Execution, outcomes: list[Outcome]) -> Committed:
        """Record outcomes however long the database stays away: the work is done and the lease may still hold.

        Raises:
            StatementFailed: The journal will never take them.
        """
        while True:
            try:
                return self._journal.commit(lease, outcomes, execution.records)
            except StorageUnavailable as error:
                if not self._is_patient:
                    raise
                if self._keeper.current() is not lease:
                    raise LeaseLost(f"mesh {lease.mesh}: epoch {lease.epoch} has ended", mesh=lease.mesh) from error
                count = len(outcomes)
                _log.warning("commit.postponed", error=error.message, retry_s=_COMMIT_RETRY_S, count=count)
                self._clock.sleep(_COMMIT_RETRY_S)

    def _untaken(self, committed: Committed, execution: Execution) -> set[str]:
        """Where an outcome was not taken, memory and journal may differ about that adapter, and about no other one."""
        lanes = set()
        for untaken, next_step in (
            (committed.ended_before, "what was recorded before stands"),
            (committed.not_held, "it is claimed again"),
        ):
            for outcome in untaken:
                if outcome.kind.is_ordered:
                    lanes.add(outcome.lane)
                _log.warning("outcome.not_taken", op=outcome.request_id, kind=outcome.kind.value, next=next_step)
        # Of what only followed on another one that was not taken, the attempt is still in our hands.
        execution.returned += [execution.begun[outcome.request_id][0] for outcome in committed.not_held]
        return lanes

    def close(self) -> None:
        """End when all is told."""
        self._teller.shutdown(wait=True)

    def _tell(self, committed: Committed, execution: Execution, half: Half) -> None:
        """Say what has ended. Of what had ended before, nobody may have heard; what it came to is not ours to say."""
        crash_point(f"{half}.telling")
        ended = [*committed.recorded, *committed.ended_before]
        self._publisher.publish([outcome.request_id for outcome in ended])
        for outcome in committed.recorded:
            self._reporter.ended([outcome], execution.begun[outcome.request_id][1])
        crash_point(f"{half}.published")


def _take_back(execution: Execution, outcomes: list[Outcome]) -> None:
    """Let these outcomes never have been: their claims go back to the journal."""
    for outcome in outcomes:
        execution.outcomes.remove(outcome)
        execution.records.pop(outcome.request_id, None)
        claim, _ = execution.begun.pop(outcome.request_id)
        execution.returned.append(claim)


def _log_untold(told: Future[None]) -> None:
    if (error := told.exception()) is not None:
        _log.error("outcome.not_told", error=str(error), next="whoever waits looks by itself", exc_info=error)


def _parts_of(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """Those of each adapter, in their order; what is in no order stands alone."""
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        parts.setdefault(outcome.lane if outcome.kind.is_ordered else outcome.request_id, []).append(outcome)
    return list(parts.values())


def _condemn(execution: Execution, outcomes: list[Outcome], error: Exception) -> list[Outcome]:
    """Put failures in the place of outcomes that the journal will never take."""
    incident = secrets.token_hex(4)
    _log.error("commit.refused", error=str(error), incident=incident, exc_info=error)
    for each in outcomes:
        claim, _ = execution.begun[each.request_id]
        reason = {"reason": StatementFailed.code, "category": FailureCategory.SERVER.value, "incident": incident}
        _log.warning("operation.failed", **facts_of(claim), **reason)
    failure = Failure(
        message=f"internal error, incident {incident}", category=FailureCategory.SERVER, code=StatementFailed.code
    )
    condemned = {
        each.request_id: Outcome(
            request_id=each.request_id, lane=each.lane, seq=each.seq, kind=each.kind, failure=failure
        )
        for each in outcomes
    }
    execution.outcomes = [condemned.get(each.request_id, each) for each in execution.outcomes]
    execution.records = {key: records for key, records in execution.records.items() if key not in condemned}
    return list(condemned.values())
