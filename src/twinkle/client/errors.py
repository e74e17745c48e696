"""Everything a client can raise on purpose: a part of the project's one tree, and what only a client meets.

TwinkleError                        code, retryable, context as attributes
├── UserError                       the caller can fix it; never sent again
│   ├── InvalidInput, NotFound, Conflict, Forbidden, Unauthenticated, TooLarge, LimitReached
│   ├── Cancelled                   the operation was cancelled before it had an outcome
│   ├── Expired                     the result was kept for its time and is gone
│   ├── RunClosed                   an operation could not be handed over, so the run takes no more from this object
│   └── ClientClosed                the client was closed; the outcome can still be had with ``client.future``
├── OperationFailed                 the operation was accepted and ended in an error: code, message, category
├── JobEndedBadly                   the job was asked for its result, and failed or was cancelled
├── BadAnswer                       what answered is no Twinkle server, or of another age
├── TransientError                  was tried again until the time for that was up
│   ├── Overloaded                  429: too much waits already
│   └── Unavailable                 no connection, or an answer of 500 and above
└── ConfigError                     no key, or a URL that is none

A wait that was given a timeout raises the built-in ``TimeoutError``; the operation goes on.
"""

from __future__ import annotations

from twinkle.core.errors import (
    Cancelled,
    ConfigError,
    Conflict,
    Expired,
    Forbidden,
    InvalidInput,
    LimitReached,
    NotFound,
    Overloaded,
    TooLarge,
    TransientError,
    TwinkleError,
    Unauthenticated,
    UserError,
)
from twinkle.wire.bodies.futures import ErrorCategory

__all__ = [
    "BadAnswer",
    "Cancelled",
    "ClientClosed",
    "ConfigError",
    "Conflict",
    "Expired",
    "Forbidden",
    "InvalidInput",
    "JobEndedBadly",
    "LimitReached",
    "NotFound",
    "OperationFailed",
    "Overloaded",
    "RunClosed",
    "TooLarge",
    "TransientError",
    "TwinkleError",
    "Unauthenticated",
    "Unavailable",
    "UserError",
    "refusal_of",
]


class OperationFailed(TwinkleError):
    """An accepted operation ended in an error, which is its outcome for ever."""

    def __init__(self, message: str, *, request_id: str, code: str, category: ErrorCategory) -> None:
        super().__init__(f"{request_id}: {message}", request_id=request_id, category=category)
        self.request_id = request_id
        self.code = code
        self.category = category
        """Who can mend it: ``user``, ``server`` or ``unknown``."""


class JobEndedBadly(TwinkleError):
    """A job has no result: it failed, with the reason, or was cancelled."""

    def __init__(self, message: str, *, job_id: str, code: str) -> None:
        super().__init__(message, job_id=job_id)
        self.job_id = job_id
        self.code = code


class BadAnswer(TwinkleError):
    """An answer that cannot be understood: from something in between, or from a server of another age."""

    code = "bad_answer"


class RunClosed(UserError):
    """The run takes no more operations from this object, as an earlier one could not be handed over."""

    code = "run_closed"


class ClientClosed(UserError):
    """The client was closed before the outcome was there."""

    code = "client_closed"


class Unavailable(TransientError):
    """The server could not be reached, or could not answer, for as long as was tried."""

    code = "unavailable"


_BY_CODE: dict[str, type[UserError]] = {
    kind.code: kind
    for kind in (NotFound, Conflict, Forbidden, Unauthenticated, TooLarge, LimitReached, Expired, Cancelled)
}
_BY_STATUS: dict[int, type[UserError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    410: Expired,
    413: TooLarge,
}


def refusal_of(status: int, code: str, detail: str) -> TwinkleError:
    """The error for a refusal that is not worth another attempt: by our code, else by the HTTP status."""
    if code == InvalidInput.code:
        field, separator, message = detail.partition(": ")
        return InvalidInput(field, message) if separator else InvalidInput("request", detail)
    return _BY_CODE.get(code, _BY_STATUS.get(status, UserError))(detail)
