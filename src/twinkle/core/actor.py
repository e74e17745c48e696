"""Who acts now, for the audit log: a key, a job, the operator at a command line, or the service by itself.

It is of the task or thread at work, set once where a request or a command comes in, and read only where it is written
down: what is decided never depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SERVICE = "service"
"""What nobody has asked for just now: workers, housekeeping."""
TENANT = "tenant"
"""One of a tenant's keys; which one was not written down."""

_actor: ContextVar[str] = ContextVar("actor", default=SERVICE)


def act_as(actor: str) -> None:
    """From now on it is this one, in this task or thread and in what it starts."""
    _actor.set(actor)


@contextmanager
def acting_as(actor: str) -> Iterator[None]:
    """The same until the end of the block."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def actor_now() -> str:
    """Who acts."""
    return _actor.get()


def key_actor(key_id: str) -> str:
    """What a key is called; ``twinkle keys show`` finds it by the id."""
    return f"key {key_id}"


def job_actor(job: str) -> str:
    """What a job is called."""
    return f"job {job}"


def operator_actor(user: str) -> str:
    """What somebody is called who gives a command on the journal itself."""
    return f"operator {user}"
