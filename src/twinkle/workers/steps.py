"""Work that goes on in steps: between two of them the step loop does others' work, or waits for the object store.

What an operation does to the device it does on the step loop's thread; what it reads or writes goes to a few threads of
:class:`Transfers`. It is written down once, as a generator that yields what it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.core.slices import Slices
from twinkle.storage.blobs import BlobStore
from twinkle.storage.payloads import read_payload

Result = TypeVar("Result")

Wait: TypeAlias = Callable[[], bool]
"""Whether what was waited for is there. Asked on the step loop's thread."""

Steps: TypeAlias = Generator[Wait, None, Result]

_LOOK_AGAIN_S = 1.0

_log = structlog.get_logger()


def turn() -> bool:
    """What is yielded to let others go first: there is nothing to wait for."""
    return True


def with_turns(slices: Slices[Result]) -> Steps[Result]:
    """What slices come to; others go first between any two."""
    try:
        while True:
            next(slices)
            yield turn
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        slices.close()


def timed(steps: Steps[Result], clock: Clock) -> Steps[tuple[Result, float]]:
    """What steps come to, and the seconds they held the device: neither waits count nor what others did between."""
    held_s = 0.0
    while True:
        began_at = clock.now()
        try:
            wait = next(steps)
        except StopIteration as end:
            return end.value, held_s + clock.now() - began_at
        held_s += clock.now() - began_at
        yield wait


class Transfers:
    """Reads and writes of the object store, a few at a time. Bytes to be written are bounded: who has more waits."""

    def __init__(self, executor: Executor, *, max_bytes: int) -> None:
        """Take the threads.

        Args:
            executor: Where they run.
            max_bytes: While more is on its way, nothing more is taken off the device or begun to be read.
        """
        self._executor = executor
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.changed = threading.Event()
        """Set whenever one has ended."""

    @property
    def has_room(self) -> bool:
        """Whether more may be begun."""
        return self._num_bytes < self._max_bytes

    def has_room_beside(self, num_bytes: int) -> bool:
        """Whether more may be begun, counting so much that is about to be."""
        return self._num_bytes + num_bytes < self._max_bytes

    @property
    def num_bytes(self) -> int:
        """How much is on its way."""
        return self._num_bytes

    def begin(self, call: Callable[[], Result], *, num_bytes: int) -> Future[Result]:
        """Run ``call`` on one of the threads. Whoever begins it reads its result."""
        with self._lock:
            self._num_bytes += num_bytes
        future = self._executor.submit(call)
        future.add_done_callback(partial(self._end, num_bytes))
        return future

    def away(self, call: Callable[[], Result], *, num_bytes: int) -> Steps[Result]:
        """What ``call`` answers, or raises, on one of the threads."""
        future = self.begin(call, num_bytes=num_bytes)
        try:
            yield future.done
        except GeneratorExit:
            # Nobody wants it any more, as when the lease was lost.
            if not future.cancel():
                future.add_done_callback(_log_unwanted)
            raise
        return future.result()

    def room(self) -> Steps[None]:
        """Wait until more may be begun."""
        while not self.has_room:
            yield self._has_room

    def read(self, blobs: BlobStore, payload: Payload) -> Steps[bytes]:
        """The bytes of a payload, at once where they are inline.

        Raises:
            StorageUnavailable: The object store did not answer, or lacks the blob.
        """
        if payload.inline is not None:
            return payload.inline
        yield from self.room()
        return (yield from self.away(lambda: read_payload(blobs, payload), num_bytes=payload.size_bytes))

    def at_once(self, steps: Steps[Result]) -> Result:
        """Go all the way and let nobody else do anything meanwhile."""
        try:
            while True:
                wait = next(steps)
                while not wait():
                    self.changed.wait(_LOOK_AGAIN_S)
                    self.changed.clear()
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            self.changed.set()

    def close(self) -> None:
        """End when what was begun has ended."""
        self._executor.shutdown(wait=True)

    def _has_room(self) -> bool:
        return self.has_room

    def _end(self, num_bytes: int, _: Future[object]) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
        self.changed.set()


def _log_unwanted(future: Future[Result]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.warning("transfer.failed", error=str(error), next="nobody waits for it any more")


class Job(Generic[Result]):
    """Steps under way, and what they came to."""

    def __init__(self, steps: Steps[Result]) -> None:
        self._steps = steps
        self._wait: Wait = turn
        self.has_ended = False
        self._result: Result | None = None
        self.error: Exception | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to do now."""
        return not self.has_ended and self._wait()

    @property
    def result(self) -> Result:
        """What they came to, where they ended without an error."""
        assert self.has_ended and self.error is None
        return self._result  # type: ignore[return-value]

    def drop(self) -> None:
        """End where it is: nobody wants what it would come to."""
        self.has_ended = True
        self._steps.close()

    def go_on(self) -> None:
        """Go on until there is something to wait for, or others may go first."""
        while not self.has_ended:
            try:
                self._wait = next(self._steps)
            except StopIteration as end:
                self.has_ended, self._result = True, end.value
            except Exception as error:  # noqa: BLE001 - the border: whatever it is, it is this job's
                self.has_ended, self.error = True, error
            if self.has_ended or self._wait is turn or not self._wait():
                return


class LaneJobs:
    """What is under way with lanes, a job each. Lives on the step loop's thread."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job[None]] = {}

    @property
    def lanes(self) -> set[str]:
        """Those with which something is under way."""
        return set(self._jobs)

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to do now."""
        return any(job.can_go_on for job in self._jobs.values())

    def forget_all(self) -> None:
        """The mesh is somebody else's now."""
        self._jobs.clear()

    def _go_on(self) -> Iterator[tuple[str, StorageUnavailable]]:
        """Go on with each; the lanes whose jobs ended for want of storage. Any other error of a job is raised."""
        for lane, job in list(self._jobs.items()):
            if job.can_go_on:
                job.go_on()
            if job.has_ended:
                del self._jobs[lane]
            if isinstance(job.error, StorageUnavailable):
                yield lane, job.error
            elif job.error is not None:
                raise job.error
