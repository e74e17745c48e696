"""How an attempt at an operation ends: a result, a failure, or another attempt later; recorded first, then told."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeAlias

import structlog

from twinkle.core.clock import Clock
from twinkle.core.crash import crash_point
from twinkle.core.errors import (
    Cancelled,
    InvalidInput,
    LeaseLost,
    PoisonOperation,
    StatementFailed,
    StorageUnavailable,
    TwinkleError,
    UserError,
)
from twinkle.core.lease import Lease
from twinkle.core.operation import CANCELLED_BY_OPERATOR, Claim, Failure, FailureCategory, Outcome, Payload
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.retry import Retry, decide
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.executing import Committed
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.records import Records
from twinkle.storage.payloads import write_result
from twinkle.workers.engine import State
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.report import OperationReporter
from twinkle.workers.residents import Residents
from twinkle.workers.steps import Steps, Transfers

Half: TypeAlias = Literal["worker", "sampler"]
"""Of the step loop: trains, or samples. Crash points are named after them."""

_COMMIT_RETRY_S = 0.5

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Postponed:
    """A claim whose attempt failed and that is to be tried again."""

    claim: Claim
    retry: Retry


@dataclass(kw_only=True)
class Execution:
    """What came of a batch; ``records`` is what each outcome brings into being, by its future.

    ``begun`` says of each that ended what was claimed, and when it was begun; ``returned`` are those that go back to
    the journal as if they had never been claimed, since the state they were to be done with is gone.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    postponed: list[Postponed] = field(default_factory=list)
    returned: list[Claim] = field(default_factory=list)
    records: dict[str, Records] = field(default_factory=dict)
    begun: dict[str, tuple[Claim, float]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.outcomes or self.postponed or self.returned)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the journal has taken of an execution; ``spoilt`` are lanes in which memory and journal differ now."""

    execution: Execution
    committed: Committed
    spoilt: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Endings:
    """Adds the end of each attempt to an execution. Results above ``inline_bytes`` become blobs."""

    blobs: BlobStore
    clock: Clock
    transfers: Transfers
    inline_bytes: int
    max_attempts: int

    def store(self, claim: Claim, result: bytes) -> Steps[Payload]:
        """Put a result, in wire form, where its size says.

        Raises:
            StorageUnavailable: The result is large and could not be stored.
        """
        write = partial(
            write_result,
            self.blobs,
            claim.request_id,
            result,
            inline_bytes=self.inline_bytes,
            now=self.clock.now(),
        )
        if len(result) <= self.inline_bytes:
            return write()
        return (yield from self.transfers.away(write, num_bytes=len(result)))

    def succeed(
        self,
        execution: Execution,
        claim: Claim,
        result: Payload,
        *,
        device_s: float,
        num_tokens: int,
        charge: int,
        clears_gradients: bool = False,
    ) -> None:
        """It has a result, which is stored."""
        execution.outcomes.append(
            Outcome(
                request_id=claim.request_id,
                lane=claim.lane,
                seq=claim.seq,
                kind=claim.kind,
                result=result,
                device_s=device_s,
                num_tokens=num_tokens,
                charge=charge,
                clears_gradients=clears_gradients,
            )
        )

    def fail(self, execution: Execution, claim: Claim, error: Exception, *, charge: int = 1) -> None:
        """It ended with an error: fail it or postpone it, as the error's type says. A retry is charged to nobody."""
        incident = secrets.token_hex(4)
        verdict = decide(error, attempt=claim.attempt, max_attempts=self.max_attempts, incident=incident)
        if isinstance(verdict, Retry):
            _log.warning("operation.postponed", **_facts_of(claim), error=str(error), delay_s=verdict.delay_s)
            execution.postponed.append(Postponed(claim=claim, retry=verdict))
            return
        self._end_in_failure(execution, claim, verdict, error, incident=incident, charge=charge)

    def end_poisonous(self, claims: list[Claim], execution: Execution) -> list[Claim]:
        """End those that have taken the worker down as often as they may; the others, which are to be executed."""
        fit = []
        for claim in claims:
            if claim.suspicions < self.max_attempts:
                fit.append(claim)
                continue
            execution.begun[claim.request_id] = (claim, self.clock.now())
            self._end_as_poison(execution, claim)
        return fit

    def _end_as_poison(self, execution: Execution, claim: Claim) -> None:
        message = f"the worker died or its device failed during each of {self.max_attempts} attempts at this operation"
        error = PoisonOperation(message)
        failure = Failure(message=message, category=FailureCategory.SERVER, code=error.code)
        self._end_in_failure(execution, claim, failure, error)

    def _end_in_failure(
        self,
        execution: Execution,
        claim: Claim,
        failure: Failure,
        error: Exception,
        *,
        incident: str | None = None,
        charge: int = 1,
    ) -> None:
        """Every failed operation has one line in the log. It says which and why, and nothing of what was sent."""
        reason = {"reason": failure.code, "category": failure.category.value}
        if isinstance(error, InvalidInput):
            reason["field"] = error.field
        if failure.category is not FailureCategory.USER and incident is not None:
            reason["incident"] = incident
        is_unexpected = not isinstance(error, TwinkleError)
        _log.warning("operation.failed", **_facts_of(claim), **reason, exc_info=error if is_unexpected else None)
        execution.outcomes.append(outcome_of_failure(claim, failure, charge=charge))


def _facts_of(claim: Claim) -> dict[str, object]:
    return {
        "op": claim.request_id,
        "kind": claim.kind.value,
        "tenant": claim.tenant,
        "adapter": claim.lane,
        "seq": claim.seq,
        "attempt": claim.attempt,
    }


def outcome_of_failure(claim: Claim, failure: Failure, *, charge: int = 1) -> Outcome:
    """The outcome that records a failure."""
    return Outcome(
        request_id=claim.request_id, lane=claim.lane, seq=claim.seq, kind=claim.kind, failure=failure, charge=charge
    )


def refuse_rejected(claim: Claim) -> None:
    """Raise the reason for which an operation fails in its turn: it was refused or cancelled, its number was not."""
    if claim.rejection is None:
        return
    if claim.rejection.startswith(CANCELLED_BY_OPERATOR):
        raise Cancelled(claim.rejection)
    raise UserError(claim.rejection)


class Recorder(Generic[State]):
    """Brings what has ended into the journal, and then to those who wait for it; memory follows the journal."""

    def __init__(
        self,
        *,
        journal: Journal,
        keeper: LeaseKeeper,
        residents: Residents[State],
        publisher: CompletionPublisher,
        reporter: OperationReporter,
        clock: Clock,
        teller: Threads,
    ) -> None:
        self._journal = journal
        self._teller = teller
        self._keeper = keeper
        self._residents = residents
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
        committed, spoilt = Committed(), set[str]()
        if execution.outcomes:
            crash_point(f"{half}.executed")
            committed, spoilt = self._commit(lease, execution)
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

    def _hold_back(self, execution: Execution) -> None:
        """Take out what was made of a state that the journal does not know."""
        for outcome in [each for each in execution.outcomes if each.lane in self._spoilt]:
            execution.outcomes.remove(outcome)
            execution.records.pop(outcome.request_id, None)
            claim, _ = execution.begun.pop(outcome.request_id)
            execution.returned.append(claim)

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
        """Record outcomes; those that the journal will never take end as failures, or they would be tried for ever."""
        spoilt: set[str] = set()
        try:
            committed = self._commit_patiently(lease, execution)
        except StatementFailed as error:
            spoilt |= {outcome.lane for outcome in execution.outcomes}
            _condemn(execution, error)
            committed = self._commit_patiently(lease, execution)
        return committed, spoilt | self._untaken(committed, execution)

    def _commit_patiently(self, lease: Lease, execution: Execution) -> Committed:
        """Record outcomes however long the database stays away: the work is done and the lease may still hold.

        Raises:
            StatementFailed: The journal will never take them.
        """
        while True:
            try:
                return self._journal.commit(lease, execution.outcomes, execution.records)
            except StorageUnavailable as error:
                if not self._is_patient:
                    raise
                if self._keeper.current() is not lease:
                    raise LeaseLost(f"mesh {lease.mesh}: epoch {lease.epoch} has ended", mesh=lease.mesh) from error
                count = len(execution.outcomes)
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


def _log_untold(told: Future[None]) -> None:
    if (error := told.exception()) is not None:
        _log.error("outcome.not_told", error=str(error), next="whoever waits looks by itself", exc_info=error)


def _condemn(execution: Execution, error: Exception) -> None:
    """Put failures in the place of everything that has come of a batch."""
    incident = secrets.token_hex(4)
    _log.error("commit.refused", error=str(error), incident=incident, exc_info=error)
    for each in execution.outcomes:
        facts = {"op": each.request_id, "kind": each.kind.value, "adapter": each.lane, "seq": each.seq}
        reason = {"reason": StatementFailed.code, "category": FailureCategory.SERVER.value, "incident": incident}
        _log.warning("operation.failed", **facts, **reason)
    failure = Failure(
        message=f"internal error, incident {incident}", category=FailureCategory.SERVER, code=StatementFailed.code
    )
    execution.outcomes = [
        Outcome(request_id=each.request_id, lane=each.lane, seq=each.seq, kind=each.kind, failure=failure)
        for each in execution.outcomes
    ]
    execution.records = {}
