"""What happens to an operation that did not succeed. The policy sits on the error's type."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.errors import StatementFailed, StorageUnavailable, TransientError, TwinkleError, UserError
from twinkle.core.operation import Failure, FailureCategory

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0


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
