"""The error tree of the whole project.

TwinkleError                        code, retryable, context as attributes
├── UserError                       the caller can fix it; fails at once, never retried
│   ├── InvalidInput                a field is outside its limits (names the field, the limit, what to do)
│   │   └── BatchTooLong            more tokens in a batch than a model takes; also a ValueError
│   ├── NoRoom                      an adapter that a model has no slot or no rank for; also a RuntimeError
│   ├── NotFound                    no such thing, or not yours: both answer alike
│   ├── Conflict                    the same number was used for a different request
│   ├── Forbidden                   a download URL that has expired or was tampered with
│   ├── Unauthenticated             the key is missing, malformed or unknown
│   │   └── InvalidToken            a token that has expired, is not ours, or whose key was revoked
│   ├── LimitReached                the tenant has as many adapters as it may have
│   ├── TooLarge                    a body over the size limit
│   ├── Cancelled                   a sample its client no longer wants
│   ├── Expired                     the result was kept for its time and is gone
│   ├── CallFailed                  a call that broke half-way on what its client had sent
│   ├── WindowFailed                an optim_step whose accumulation window holds a failed forward_backward
│   └── StaleWeights                a sampler was asked whose last weights did not arrive whole; also a RuntimeError
├── TransientError                  retried with back-off
│   ├── OutOfMemory                 retried with smaller micro-batches
│   ├── StorageUnavailable          the database or the object store did not answer
│   ├── DiskFull                    too little room on the server's disk for anything new
│   ├── MeshUnavailable             no mesh has said yet what it serves
│   ├── SyncFailed                  weights did not get from the ranks that train to those that sample
│   └── Overloaded                  too much waits already; ask again in ``retry_after_s``
├── LeaseLost                       another worker holds the mesh now; nothing of ours may be committed
├── StatementFailed                 the database refused a statement of ours: a mistake in the program, said once
├── RankLost                        a worker of a script's group has ended (names group, rank and call)
├── PoisonOperation                 it took its worker down too often; ended with its reason
└── ConfigError                     a setting is wrong; the process does not start
"""

from __future__ import annotations


class TwinkleError(Exception):
    """Base of every error this project raises on purpose.

    Its message can be written anywhere, whatever it quotes.
    """

    code: str = "internal"
    retryable: bool = False

    def __init__(self, message: str, **context: object) -> None:
        self.message = writable(message)
        super().__init__(self.message)
        self.context = context

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between processes; their constructors do not all take what ``args`` holds.
        return _as_it_was, (type(self), self.args, self.__dict__)


def writable(text: str) -> str:
    """A text that databases, JSON and logs take: without NUL, and without halves of surrogate pairs."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _as_it_was(kind: type[TwinkleError], args: tuple[object, ...], attributes: dict[str, object]) -> TwinkleError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UserError(TwinkleError):
    """The caller can fix it."""

    code = "user"


class InvalidInput(UserError):
    """A field is outside its limits."""

    code = "invalid_input"

    def __init__(self, field: str, message: str) -> None:
        self.field = writable(field)
        super().__init__(f"{field}: {message}", field=self.field)


class BatchTooLong(InvalidInput, ValueError):
    """More tokens in a batch than a model was made for; scripts know it as ``ValueError``."""


class NoRoom(UserError, RuntimeError):
    """A model has no slot left, or none of that rank; scripts know it as ``RuntimeError``."""

    code = "no_room"


class NotFound(UserError):
    """No such thing, or not the caller's."""

    code = "not_found"


class Conflict(UserError):
    """The same number was used for a different request."""

    code = "conflict"


class Forbidden(UserError):
    """A download URL that has expired or was tampered with."""

    code = "forbidden"


class Unauthenticated(UserError):
    """The API key is missing, malformed or unknown."""

    code = "unauthenticated"


class InvalidToken(Unauthenticated):
    """A token that has expired, is not ours, or whose key was revoked: its holder may exchange the key again."""

    code = "invalid_token"


class LimitReached(UserError):
    """The tenant has as many of something as it may have."""

    code = "limit_reached"


class TooLarge(UserError):
    """A request body over the size limit."""

    code = "too_large"


class Cancelled(UserError):
    """A sample its client no longer wants."""

    code = "cancelled"


class Expired(UserError):
    """A result was kept for its time and is gone."""

    code = "expired"


class WindowFailed(UserError):
    """An ``optim_step`` was not applied because its accumulation window holds a failed ``forward_backward``."""

    code = "window_failed"


class StaleWeights(UserError, RuntimeError):
    """A sampler was asked that may hold other weights than the last synchronisation meant it to have."""

    code = "stale_weights"


class CallFailed(UserError):
    """A call broke half-way on what its client had sent; the adapter is brought back to where it was before."""

    code = "call_failed"


class TransientError(TwinkleError):
    """Worth another attempt."""

    code = "transient"
    retryable = True


class OutOfMemory(TransientError):
    """The device ran out of memory; the next attempt uses smaller micro-batches."""

    code = "out_of_memory"


class StorageUnavailable(TransientError):
    """The database or the object store did not answer."""

    code = "storage_unavailable"


class DiskFull(TransientError):
    """The server's disk has too little room for what would begin."""

    code = "disk_full"


class MeshUnavailable(TransientError):
    """No mesh has said yet what it serves: the workers are still starting."""

    code = "mesh_unavailable"


class SyncFailed(TransientError):
    """Weights did not get from the ranks that train to those that sample."""

    code = "sync_failed"


class Overloaded(TransientError):
    """Too much waits already, of this caller or of everybody."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class LeaseLost(TwinkleError):
    """Another worker holds the mesh now."""

    code = "lease_lost"


class StatementFailed(TwinkleError):
    """The database refused a statement: a table or a column is missing, a value does not fit, a text is no SQL."""

    code = "internal"


class RankLost(TwinkleError):
    """A worker of a script's group has ended, and with it what its group held."""

    code = "rank_lost"


class PoisonOperation(TwinkleError):
    """An operation that took its worker down too often."""

    code = "poison"


class ConfigError(TwinkleError):
    """A setting is wrong; the process does not start."""

    code = "config"
