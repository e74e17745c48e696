"""Adapters and sampling sessions that go to another mesh: stored first, so that there is nothing to replay there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.crash import crash_point
from twinkle.core.errors import StorageUnavailable, TwinkleError
from twinkle.storage.journal.moves import Leaving, Moves
from twinkle.workers.engine import State
from twinkle.workers.residents import Residents
from twinkle.workers.steps import Job, Steps

_LOOK_EVERY_S = 1.0
_MAX_AT_ONCE = 16

_log = structlog.get_logger()


class Departures(Generic[State]):
    """Lets lanes go that are sent to another mesh, a few at a time. Nothing of them is claimed meanwhile."""

    def __init__(self, *, mesh: str, moves: Moves, residents: Residents[State], clock: Clock) -> None:
        self._mesh = mesh
        self._moves = moves
        self._residents = residents
        self._clock = clock
        self._next_look_at = 0.0
        self._leaving: dict[str, Job[None]] = {}

    @property
    def lanes(self) -> set[str]:
        """Those that are about to leave."""
        return set(self._leaving)

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to do now."""
        return any(job.can_go_on for job in self._leaving.values())

    def forget_all(self) -> None:
        """The mesh is somebody else's now."""
        self._leaving.clear()

    def depart(self, *, besides: Collection[str]) -> None:
        """Look every now and then, and let go, a step at a time.

        Args:
            besides: Lanes that something is under way with.
        """
        self._go_on()
        now = self._clock.now()
        if self._leaving or now < self._next_look_at:
            return
        try:
            leaving = self._moves.leaving(self._mesh, besides=besides, limit=_MAX_AT_ONCE)
        except StorageUnavailable as error:
            _log.warning("move.failed", error=error.message, next="tried again soon")
            leaving = []
        # As long as there are more, one look follows the other.
        self._next_look_at = now if len(leaving) == _MAX_AT_ONCE else now + _LOOK_EVERY_S
        self._leaving = {one.lane: Job(self._depart(one)) for one in leaving}
        self._go_on()

    def _go_on(self) -> None:
        for lane, job in list(self._leaving.items()):
            if job.can_go_on:
                job.go_on()
            if job.has_ended:
                del self._leaving[lane]
            if isinstance(job.error, StorageUnavailable):
                _log.warning("move.failed", lane=lane, error=job.error.message, next="tried again soon")
            elif job.error is not None:
                raise job.error

    def _depart(self, leaving: Leaving) -> Steps[None]:
        if leaving.last_seq >= 0:
            try:
                is_stored = yield from self._residents.evict(leaving.lane, leaving.last_seq)
            except StorageUnavailable:
                raise
            except TwinkleError as error:
                # Nor would it be possible there; its operations say so to whoever waits for them.
                _log.warning("move.not_stored", lane=leaving.lane, error=error.message, next="it goes as it is")
                is_stored = True
            if not is_stored:
                return
        crash_point("worker.departing")
        if self._moves.finish(leaving.lane, from_mesh=self._mesh):
            crash_point("worker.departed")
            self._residents.forget(leaving.lane)
            _log.info("move.done", lane=leaving.lane, seq=leaving.last_seq)
