"""How an attempt at an operation ends: a result, a failure, or another attempt later."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import (
    Cancelled,
    InvalidInput,
    PoisonOperation,
    TwinkleError,
    UserError,
    WindowFailed,
)
from twinkle.core.operation import CANCELLED_BY_OPERATOR, Claim, Failure, FailureCategory, Outcome, Payload
from twinkle.scheduler.retry import Retry, decide
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.records import Records
from twinkle.storage.payloads import write_result
from twinkle.wire.training_result import ForwardBackwardResult, encode_forward_backward_output
from twinkle.workers.steps import Steps, Transfers

_log = structlog.get_logger()


@dataclass(frozen=True)
class Answered:
    """The result of an operation that is no pass, and what it had to compute once more for it."""

    result: bytes
    num_replayed_tokens: int = 0
    clears_gradients: bool = False
    """Whether it emptied the gradients on purpose: what failed of them before no longer counts."""


@dataclass(frozen=True, kw_only=True)
class Postponed:
    """A claim whose attempt failed and that is to be tried again."""

    claim: Claim
    retry: Retry


@dataclass(kw_only=True)
class Execution:
    """What came of a batch; ``records`` is what each outcome brings into being, by its future.

    ``begun`` says of each that ended what was claimed, and when it was begun; ``returned`` are those that go back to
    the journal as if they had never been claimed, since the state they were to be done with is gone. ``unwritten`` are
    the results of passes that are brought into wire form when they are recorded, since they are small.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    postponed: list[Postponed] = field(default_factory=list)
    returned: list[Claim] = field(default_factory=list)
    records: dict[str, Records] = field(default_factory=dict)
    begun: dict[str, tuple[Claim, float]] = field(default_factory=dict)
    unwritten: dict[str, ForwardBackwardResult] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.outcomes or self.postponed or self.returned)


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
        if len(result) <= self.inline_bytes:
            return Payload(inline=result)
        now = self.clock.now()
        return (yield from self.transfers.away(lambda: self._write(claim, result, now), num_bytes=len(result)))

    def store_pass(self, claim: Claim, result: ForwardBackwardResult) -> Steps[Payload | ForwardBackwardResult]:
        """The result of a pass as it is, if it is small; a large one is brought into wire form where it is stored.

        Raises:
            StorageUnavailable: The result is large and could not be stored.
        """
        num_bytes = result.most_bytes
        if num_bytes <= self.inline_bytes:
            return result
        now = self.clock.now()
        return (
            yield from self.transfers.away(
                lambda: self._write(claim, encode_forward_backward_output(result), now), num_bytes=num_bytes
            )
        )

    def _write(self, claim: Claim, result: bytes, now: float) -> Payload:
        return write_result(self.blobs, claim.request_id, result, inline_bytes=self.inline_bytes, now=now)

    def succeed(
        self,
        execution: Execution,
        claim: Claim,
        result: Payload | ForwardBackwardResult,
        *,
        device_s: float,
        num_tokens: int,
        charge: int,
        clears_gradients: bool = False,
    ) -> None:
        """It has a result, which is stored, or small enough to be written together with the outcome."""
        if not isinstance(result, Payload):
            execution.unwritten[claim.request_id], result = result, Payload()
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
            _log.warning("operation.postponed", **facts_of(claim), error=str(error), delay_s=verdict.delay_s)
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
        _log.warning("operation.failed", **facts_of(claim), **reason, exc_info=error if is_unexpected else None)
        execution.outcomes.append(outcome_of_failure(claim, failure, charge=charge))


def facts_of(claim: Claim) -> dict[str, object]:
    """What a line of the log says of an operation: which it is."""
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


def of_a_batch(error: Exception, num_operations: int) -> Exception:
    """What to tell each operation of a batch that ended as a whole.

    A mistake of a client's is one operation's, nobody knows which, and may quote it: the others are not told. As with a
    device that fails each is tried again, in the end alone.
    """
    if num_operations > 1 and isinstance(error, UserError):
        return RuntimeError(f"a batch ended with what one of its operations should have: {type(error).__name__}")
    return error


def refuse_rejected(claim: Claim) -> None:
    """Raise the reason for which an operation fails in its turn: it was refused or cancelled, its number was not."""
    if claim.rejection is None:
        return
    if claim.rejection.startswith(CANCELLED_BY_OPERATOR):
        raise Cancelled(claim.rejection)
    raise UserError(claim.rejection)


def window_failed(claim: Claim) -> WindowFailed:
    """Why a step is not applied whose gradients would have been incomplete."""
    return WindowFailed(
        f"optim_step {claim.seq} was not applied: operation {claim.failed_window_seq} of its accumulation"
        " window failed, so the gradients would have been incomplete; they were cleared. Send the batch again."
    )
