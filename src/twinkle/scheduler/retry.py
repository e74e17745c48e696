"""When what did not succeed is tried again: an operation, by the type of its error, or what is done for an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from twinkle.core.clock import Clock
from twinkle.core.errors import StatementFailed, StorageUnavailable, TransientError, TwinkleError, UserError
from twinkle.core.operation import Failure, FailureCategory

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_FIRST_PUT_OFF_S = 300.0
_LONGEST_PUT_OFF_S = 3600.0

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Try again after a while. ``is_suspect`` says that the operation itself may be what went wrong."""

    delay_s: float
    reason: str
    is_suspect: bool


def decide(error: Exception, *, attempt: int, max_attempts: int, incident: str) -> Failure | Retry:
    """Fail it, or try again.

    Args:
        error: What the attempt ended with.
        attempt: Which attempt that was, counted from 1.
        max_attempts: After this many an operation is not tried again.
        incident: An id the log knows; all that a user sees of an unexpected error.
    """
    if isinstance(error, UserError):
        return Failure(message=error.message, category=FailureCategory.USER, code=error.code)
    code = error.code if isinstance(error, TwinkleError) else "internal"
    is_told = isinstance(error, TwinkleError) and not isinstance(error, StatementFailed)
    message = str(error) if is_told else f"internal error, incident {incident}"
    worth_it = isinstance(error, TransientError) or not isinstance(error, TwinkleError)
    if worth_it and attempt < max_attempts:
        delay_s = min(_FIRST_DELAY_S * 2 ** (attempt - 1), _LONGEST_DELAY_S)
        return Retry(delay_s=delay_s, reason=message, is_suspect=not isinstance(error, StorageUnavailable))
    return Failure(
        message=f"{message} (attempt {attempt} of {max_attempts})", category=FailureCategory.SERVER, code=code
    )


class PutOff(Generic[KeyT]):
    """What was tried in vain beside any operation, how often, and from when on it may be tried again: ever later."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: dict[KeyT, tuple[int, float]] = {}

    def put_off(self, key: KeyT) -> dict[str, object]:
        """It has failed; the facts of that for the log: how often by now, and what comes next."""
        num_failures = self._failed.get(key, (0, 0.0))[0] + 1
        pause_s = min(_FIRST_PUT_OFF_S * 2.0 ** min(num_failures - 1, 10), _LONGEST_PUT_OFF_S)
        self._failed[key] = num_failures, self._clock.now() + pause_s
        return {"failures": num_failures, "next": f"it is left as it is, and tried again in {pause_s:.0f} s"}

    def forget(self, key: KeyT) -> None:
        """It was done."""
        self._failed.pop(key, None)

    def waiting(self) -> set[KeyT]:
        """What is not to be tried yet. Nobody tries what is gone: it is forgotten a while after it might have been."""
        now = self._clock.now()
        self._failed = {key: failed for key, failed in self._failed.items() if now < failed[1] + 2 * _LONGEST_PUT_OFF_S}
        return {key for key, (_, again_at) in self._failed.items() if now < again_at}
