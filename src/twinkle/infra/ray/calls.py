"""A call on its way to the workers of a group: submitted, watched, collected."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from twinkle.core.errors import RankLost
from twinkle.infra.rank_end import LEAST_PATIENCE_S, patience_s
from twinkle.infra.ray.worker import Raised
from twinkle.infra.remote import RemoteCall
from twinkle.infra.spread import Layout, collected

MAX_UNCOLLECTED = 32
"""Calls of an object that may be under way before the next one waits for the first of them."""
_SIGNALS_WAIT_S = 1.0
"""How long Ray may keep back what the handler of a signal has raised."""


@dataclass(eq=False)
class Workers:
    """The processes of a group that hold the same objects, by rank."""

    group: str
    handles: list[Any]
    lost: str | None = None
    """Why they can no longer be called."""
    unsettled: list[PendingCall] = field(default_factory=list)
    """Calls of which a rank has raised, or that were late, while others had not ended."""
    left_behind: deque[Backlog] = field(default_factory=deque)
    """Of objects that the script has let go: the calls that nobody has waited for."""
    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock, repr=False)
    """Of the script's threads one at a time looks after calls: each worker runs them one after the other anyway."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Workers, (self.group, self.handles, self.lost)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.handles)

    def require(self, call: str) -> None:
        """Raise ``RankLost`` when one of them has ended before, or goes on with a call that has failed or was late.

        What it calls would stand behind that one: until a collective gives up after ten minutes, or for ever. What a
        call of an object that the script has let go has raised by now is raised here.
        """
        while self.left_behind:
            self.left_behind[0].look()
            if not self.left_behind[0].is_over:
                break
            self.left_behind.popleft()
        while self.unsettled and self.lost is None:
            self.unsettled.pop().settle()
        if self.lost is not None:
            raise RankLost(f"{call} on group {self.group!r} cannot run: {self.lost}", group=self.group)

    def end(self, reason: str) -> None:
        """End all of them: they are out of step."""
        self.lost = reason
        for handle in self.handles:
            ray.kill(handle)

    def gathered(self, call: str, references: Sequence[Any]) -> list[Any]:
        """What each rank gives, by rank. Blocks until all have.

        Raises:
            RankLost: One has ended, or raised; of several the one that ended, which the others may have missed.
        """
        waiting = {reference: rank for rank, reference in enumerate(references)}
        raised: list[tuple[int, RayTaskError]] = []
        settled_by: float | None = None
        while waiting:
            left = None if settled_by is None else max(0.0, settled_by - time.monotonic())
            done = ended_of(list(waiting), timeout_s=left)
            if not done:
                break
            rank = waiting.pop(done[0])
            try:
                ray.get(done[0])
            except RayTaskError as error:
                raised.append((rank, error))
                settled_by = settled_by or time.monotonic() + LEAST_PATIENCE_S
            except RayError as error:
                raise self.lose(rank, call, error) from None
        if raised:
            first_rank, first = raised[0]
            raise self.lose(first_rank, call, first) from first.cause
        values: list[Any] = ray.get(list(references))
        return values

    def lose(self, rank: int, call: str, error: RayError) -> RankLost:
        """One has ended: the others, which may wait for it, are ended too."""
        # The first line says what; the rest is Ray's advice on its own logs.
        cause = str(error).strip().splitlines()[0]
        self.end(f"rank {rank} of group {self.group!r} ended during {call} ({type(error).__name__}: {cause})")
        return RankLost(
            f"{self.lost}; the group's workers are gone with what they held: start the script again and go on from the"
            " last checkpoint",
            group=self.group,
            rank=rank,
            call=call,
        )


def ended_of(references: Sequence[Any], *, num_returns: int = 1, timeout_s: float | None = None) -> list[Any]:
    """Those of the references that have ended, as soon as so many have, or the time is over; without a time, ever.

    What the handler of a signal raises meanwhile is raised here. Ray keeps it back until its own wait is over, and
    hides it in a ``SystemError``; a wait without an end could not even be interrupted. So it waits a while at a time.
    """
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = _SIGNALS_WAIT_S if ends_at is None else min(_SIGNALS_WAIT_S, max(0.0, ends_at - time.monotonic()))
        try:
            ended, _ = ray.wait(list(references), num_returns=num_returns, timeout=left)
        except SystemError as error:
            raise error.__cause__ or error from None
        if len(ended) >= num_returns or (ends_at is not None and time.monotonic() >= ends_at):
            return list(ended)


@dataclass(eq=False)
class PendingCall:
    """One call, submitted to some ranks of a group."""

    workers: Workers
    name: str
    ranks: Sequence[int]
    statuses: list[Any]
    """By rank, the reference of its exception, which is None where it returned."""
    values: list[Any]
    timeout_s: float | None = None
    _failure: Exception | None = field(default=None, init=False)
    _waiting: dict[Any, int] = field(init=False)
    _cause: str = field(default="", init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _patience_s: float = field(default=LEAST_PATIENCE_S, init=False)
    _settled_by: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._waiting = dict(zip(self.statuses, self.ranks, strict=True))

    @property
    def is_over(self) -> bool:
        """Whether every rank has been seen to end, or one to fail: then the script has been told."""
        return not self._waiting or self._failure is not None

    def look(self) -> None:
        """Take notice of the ranks that have ended by now, without waiting.

        Raises:
            Exception: What one of them has raised.
        """
        while not self.is_over and self._take(timeout_s=0):
            pass

    def wait(self) -> None:
        """Wait until every rank has ended, or one has failed.

        Raises:
            Exception: What a rank has raised, with a note of group, rank and call.
            RankLost: A worker has ended.
            TimeoutError: The mark's time is over. The next call of the group waits for the ranks that are late as for
                those beside one that has raised (:meth:`settle`).
        """
        if self._failure is not None:
            raise self._failure
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        while self._waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._take(timeout_s=left):
                raise self._late()

    def _take(self, timeout_s: float | None) -> bool:
        ended = self._next(timeout_s)
        if ended is None:
            return False
        rank, raised = ended
        if raised is None:
            return True
        # A collective that fails tells at one rank what happened at another: that is waited for, and told instead.
        settled_by = time.monotonic() + LEAST_PATIENCE_S
        while raised.is_of_collective and self._waiting:
            ended = self._next(max(0.0, settled_by - time.monotonic()))
            if ended is None:
                break
            if ended[1] is not None:
                rank, raised = ended[0], ended[1]
        raise self._failed(raised.error_again(), rank, raised.trace)

    def _next(self, timeout_s: float | None) -> tuple[int, Raised | None] | None:
        done = ended_of(list(self._waiting), timeout_s=timeout_s)
        if not done:
            return None
        rank = self._waiting.pop(done[0])
        try:
            said = ray.get(done[0])
            # The end of an iterator is told beside exceptions.
            return rank, said if isinstance(said, Raised) else None
        except RayTaskError as error:
            return rank, Raised(None, f"{error.cause}", str(error))
        except RayError as error:
            self._waiting.clear()
            self._failure = self.workers.lose(rank, self.name, error)
            raise self._failure from None

    def _failed(self, error: Exception, rank: int, trace: str) -> Exception:
        error.add_note(f"raised by {self.name} on group {self.workers.group!r}, rank {rank}:\n{trace}")
        self._failure = error
        if self._waiting:
            self._unsettled(f"rank {rank} raised {type(error).__name__} in {self.name}")
        return error

    def _late(self) -> Exception:
        what = f"ranks {sorted(self._waiting.values())} have not ended within {self.timeout_s:g} s"
        self._failure = TimeoutError(f"{self.name} on group {self.workers.group!r}: {what}")
        self._unsettled(f"{self.name} was called: {what}")
        return self._failure

    def _unsettled(self, cause: str) -> None:
        self._cause = cause
        now = time.monotonic()
        self._patience_s = patience_s(now - self._began)
        self._settled_by = now + self._patience_s
        self.workers.unsettled.append(self)

    def settle(self) -> None:
        """Wait until the ranks that had not ended when it failed have ended too, or end the group where they do not."""
        left = max(0.0, self._settled_by - time.monotonic())
        ended = ended_of(list(self._waiting), num_returns=len(self._waiting), timeout_s=left)
        ranks = sorted(rank for status, rank in self._waiting.items() if status not in ended)
        if ranks:
            self.workers.end(
                f"{self._cause}, and ranks {ranks} had not ended {self._patience_s:.0f} s later: nothing could be"
                " called behind that, and the group's workers were ended; mend the cause and start the script again"
                " from the last checkpoint"
            )

    def status(self) -> Any:
        """What the only rank said beside its value."""
        return ray.get(self.statuses[0])

    def fetch(self, rank: int) -> Any:
        """The value of a rank that has ended."""
        try:
            return ray.get(self.values[list(self.ranks).index(rank)])
        except GetTimeoutError:
            raise
        except RayError as error:
            raise self.workers.lose(rank, self.name, error) from None


class Backlog:
    """The calls of one object that nobody has waited for yet. What they raise, a later call raises."""

    def __init__(self) -> None:
        self._calls: deque[PendingCall] = deque()

    def add(self, call: PendingCall) -> None:
        """One more; the oldest is waited for where there are many."""
        self._calls.append(call)
        if len(self._calls) > MAX_UNCOLLECTED:
            oldest = self._calls.popleft()
            if not oldest.is_over:
                oldest.wait()

    @property
    def is_over(self) -> bool:
        """Whether none of them is left."""
        return not self._calls

    def look(self) -> None:
        """Raise what one of them has raised by now; those that are over are forgotten."""
        self._go_through(waits=False)

    def wait(self, until: PendingCall | None = None) -> None:
        """Wait for all, or for one and those before it: ranks run them in this order.

        Raises:
            Exception: What the first to fail has raised.
        """
        self._go_through(waits=True, until=until)

    def _go_through(self, *, waits: bool, until: PendingCall | None = None) -> None:
        while self._calls:
            first = self._calls[0]
            try:
                if not first.is_over:
                    first.wait() if waits else first.look()
            except TimeoutError:
                raise
            except Exception:
                self._calls.popleft()
                raise
            if not first.is_over:
                return
            self._calls.popleft()
            if first is until:
                return


class LazyResult:
    """The result of a call that may not have ended: call it to wait for the value.

    Given on to another call, it is waited for there.
    """

    def __init__(self, call: PendingCall, mark: RemoteCall, layout: Layout, wanted: Sequence[int], wrap: Any) -> None:
        self._call = call
        self._mark = mark
        self._layout = layout
        self._wanted = wanted
        self._wrap = wrap
        self._values: list[Any] | None = None

    def __repr__(self) -> str:
        return f"<result of {self._call.name} on group {self._call.workers.group!r}; call it for the value>"

    def __call__(self) -> Any:
        """Wait; the value.

        Raises:
            Exception: What a rank has raised.
        """
        with self._call.workers.lock:
            if self._values is not None:
                return self._values[0]
            self._call.wait()
            fetched = [self._wrap(self._call.fetch(rank), rank) for rank in self._wanted]
            self._values = [collected(self._mark, self._layout, fetched)]
        return self._values[0]
