"""What leaves a worker's memory for another reason than room: what goes to another mesh, and what its client has left.

Both are stored first, so that there is nothing to replay when they come back, here or there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.retry import PutOff
from twinkle.storage.adapters.adapters import Adapters
from twinkle.storage.journal.moves import Leaving, Moves
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.engine import State
from twinkle.workers.steps import Job, LaneJobs, Steps

_LOOK_FOR_LEAVING_EVERY_S = 1.0
_MAX_LEAVING_AT_ONCE = 16
_LOOK_FOR_SILENT_EVERY_S = 5.0
_MAX_PARKED_AT_ONCE = 4

_log = structlog.get_logger()


class Departures(LaneJobs, Generic[State]):
    """Lets lanes go that are sent to another mesh, a few at a time. Nothing of them is claimed meanwhile."""

    def __init__(self, *, mesh: str, moves: Moves, residents: Residents[State], clock: Clock) -> None:
        super().__init__()
        self._mesh = mesh
        self._moves = moves
        self._residents = residents
        self._clock = clock
        self._next_look_at = 0.0

    def depart(self, *, besides: Collection[str]) -> None:
        """Look every now and then, and let go, a step at a time.

        Args:
            besides: Lanes that something is under way with.
        """
        self._depart_on()
        now = self._clock.now()
        if self._jobs or now < self._next_look_at:
            return
        try:
            leaving = self._moves.leaving(self._mesh, besides=besides, limit=_MAX_LEAVING_AT_ONCE)
        except StorageUnavailable as error:
            _log.warning("move.failed", error=error.message, next="tried again soon")
            leaving = []
        # As long as there are more, one look follows the other.
        self._next_look_at = now if len(leaving) == _MAX_LEAVING_AT_ONCE else now + _LOOK_FOR_LEAVING_EVERY_S
        self._jobs = {one.lane: Job(self._depart(one)) for one in leaving}
        self._depart_on()

    def _depart_on(self) -> None:
        for lane, error in self._go_on():
            _log.warning("move.failed", lane=lane, error=error.message, next="tried again soon")

    def _depart(self, leaving: Leaving) -> Steps[None]:
        if leaving.last_seq >= 0:
            try:
                is_stored = yield from self._residents.evict(leaving.lane, leaving.last_seq)
            except StorageUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - the border: what is wrong with one lane disturbs no other
                # If it is not possible there either, its operations say so to whoever waits for them.
                _log.error(
                    "move.not_stored", lane=leaving.lane, error=str(error), next="it goes as it is", exc_info=error
                )
                is_stored = True
            if not is_stored:
                return
        crash_point("worker.departing")
        if self._moves.finish(leaving.lane, from_mesh=self._mesh):
            crash_point("worker.departed")
            self._residents.forget(leaving.lane)
            _log.info("move.done", lane=leaving.lane, seq=leaving.last_seq)


class Absences(LaneJobs, Generic[State]):
    """Parks the adapters of sessions that have ended or fallen silent, a few at a time.

    One that is not in memory any more (its worker died) is restored first where its last operations are covered by no
    snapshot, so that nothing is left to replay and its payloads need not be kept for ever.
    """

    def __init__(
        self, *, mesh: str, adapters: Adapters, residents: Residents[State], clock: Clock, silent_s: float
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._adapters = adapters
        self._residents = residents
        self._clock = clock
        self._silent_s = silent_s
        self._next_look_at = 0.0
        self._failed: PutOff[str] = PutOff(clock)

    def park(self, *, besides: Collection[str]) -> None:
        """Look every few seconds, and park, a step at a time.

        Args:
            besides: Adapters that something is under way with.
        """
        self._park_on()
        now = self._clock.now()
        if self._jobs:
            return
        if now < self._next_look_at:
            return
        self._next_look_at = now + _LOOK_FOR_SILENT_EVERY_S
        others = [*self._residents.used(within_s=self._silent_s), *self._failed.waiting(), *besides]
        try:
            abandoned = self._adapters.abandoned(
                self._mesh, silent_s=self._silent_s, besides=others, limit=_MAX_PARKED_AT_ONCE
            )
        except StorageUnavailable as error:
            _log.warning("adapter.parking_failed", error=error.message, next="tried again soon")
            return
        self._jobs = {adapter: Job(self._park(adapter, last_seq)) for adapter, last_seq in abandoned}
        self._park_on()

    def _park_on(self) -> None:
        for _, error in self._go_on():
            _log.warning("adapter.parking_failed", error=error.message, next="tried again soon")

    def _park(self, adapter: str, last_seq: int) -> Steps[None]:
        try:
            is_stored = yield from self._residents.evict(adapter, last_seq)
        except StorageUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - the border: what is wrong with one adapter disturbs no other
            facts = {"adapter": adapter, "error": str(error), **self._failed.put_off(adapter)}
            _log.error("adapter.not_parked", **facts, exc_info=error)
            return
        self._failed.forget(adapter)
        if is_stored and self._adapters.park(adapter, last_seq=last_seq):
            _log.info("adapter.parked_for_session", adapter=adapter, seq=last_seq)
