"""How an attempt at an operation ends: a result, a failure, or another attempt later."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidInput, PoisonOperation, StatementFailed, TwinkleError, UserError
from twinkle.core.operation import Claim, Failure, FailureCategory, Outcome, Payload
from twinkle.scheduler.retry import Retry, decide
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.records import Records
from twinkle.storage.payloads import write_result
from twinkle.workers.steps import Steps, Transfers

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Postponed:
    """A claim whose attempt failed and that is to be tried again."""

    claim: Claim
    retry: Retry


@dataclass(kw_only=True)
class Execution:
    """What came of a batch; ``records`` is what each outcome brings into being, by its future.

    ``begun`` says of each that ended what was claimed, and when it was begun.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    postponed: list[Postponed] = field(default_factory=list)
    records: dict[str, Records] = field(default_factory=dict)
    begun: dict[str, tuple[Claim, float]] = field(default_factory=dict)


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
        self, execution: Execution, claim: Claim, result: Payload, *, device_s: float, num_tokens: int, charge: int
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
            )
        )

    def fail(self, execution: Execution, claim: Claim, error: Exception) -> None:
        """It ended with an error: fail it or postpone it, as the error's type says."""
        incident = secrets.token_hex(4)
        verdict = decide(error, attempt=claim.attempt, max_attempts=self.max_attempts, incident=incident)
        if isinstance(verdict, Retry):
            _log.warning("operation.postponed", **_facts_of(claim), error=str(error), delay_s=verdict.delay_s)
            execution.postponed.append(Postponed(claim=claim, retry=verdict))
            return
        self._end_in_failure(execution, claim, verdict, error, incident=incident)

    def end_poisonous(self, execution: Execution, claim: Claim) -> None:
        """It has taken its worker down as often as it may."""
        message = f"the worker died or its device failed during each of {self.max_attempts} attempts at this operation"
        error = PoisonOperation(message)
        failure = Failure(message=message, category=FailureCategory.SERVER, code=error.code)
        self._end_in_failure(execution, claim, failure, error)

    def _end_in_failure(
        self, execution: Execution, claim: Claim, failure: Failure, error: Exception, *, incident: str | None = None
    ) -> None:
        """Every failed operation has one line in the log. It says which and why, and nothing of what was sent."""
        reason = {"reason": failure.code, "category": failure.category.value}
        if isinstance(error, InvalidInput):
            reason["field"] = error.field
        if failure.category is not FailureCategory.USER and incident is not None:
            reason["incident"] = incident
        is_unexpected = not isinstance(error, TwinkleError)
        _log.warning("operation.failed", **_facts_of(claim), **reason, exc_info=error if is_unexpected else None)
        execution.outcomes.append(outcome_of_failure(claim, failure))


def _facts_of(claim: Claim) -> dict[str, object]:
    return {
        "op": claim.request_id,
        "kind": claim.kind.value,
        "tenant": claim.tenant,
        "adapter": claim.lane,
        "seq": claim.seq,
        "attempt": claim.attempt,
    }


def outcome_of_failure(claim: Claim, failure: Failure) -> Outcome:
    """The outcome that records a failure."""
    return Outcome(request_id=claim.request_id, lane=claim.lane, seq=claim.seq, kind=claim.kind, failure=failure)


def condemn(execution: Execution, error: Exception) -> None:
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


def refuse_rejected(claim: Claim) -> None:
    """Raise the reason for which the API had to refuse a request whose number it could not refuse."""
    if claim.rejection is not None:
        raise UserError(claim.rejection)
