"""Adapters whose client has gone leave the device: snapshotted, then evicted. The next operation brings them back."""

from __future__ import annotations

from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable, TwinkleError
from twinkle.storage.adapters.parking import Parking
from twinkle.workers.engine import State
from twinkle.workers.residents import Residents

_LOOK_EVERY_S = 5.0
_MAX_AT_ONCE = 4

_log = structlog.get_logger()


class Absences(Generic[State]):
    """Parks the adapters of sessions that have ended or fallen silent, a few at a time.

    One that is not in memory any more (its worker died) is restored first where its last operations are covered by no
    snapshot, so that nothing is left to replay and its payloads need not be kept for ever.
    """

    def __init__(
        self, *, mesh: str, parking: Parking, residents: Residents[State], clock: Clock, silent_s: float
    ) -> None:
        self._mesh = mesh
        self._parking = parking
        self._residents = residents
        self._clock = clock
        self._silent_s = silent_s
        self._next_look_at = 0.0
        self._hopeless: set[str] = set()

    def park(self) -> None:
        """Look every few seconds, and park. Called between batches, when every resident is as the journal says."""
        now = self._clock.now()
        if now < self._next_look_at:
            return
        self._next_look_at = now + _LOOK_EVERY_S
        besides = [*self._residents.used(within_s=self._silent_s), *self._hopeless]
        try:
            abandoned = self._parking.abandoned(
                self._mesh, silent_s=self._silent_s, besides=besides, limit=_MAX_AT_ONCE
            )
            for adapter, last_seq in abandoned:
                self._park(adapter, last_seq)
        except StorageUnavailable as error:
            _log.warning("adapter.parking_failed", error=error.message, next="tried again soon")

    def _park(self, adapter: str, last_seq: int) -> None:
        try:
            is_stored = self._residents.evict(adapter, last_seq)
        except StorageUnavailable:
            raise
        except TwinkleError as error:
            self._hopeless.add(adapter)
            _log.warning("adapter.not_parked", adapter=adapter, error=error.message, next="it is left as it is")
            return
        if is_stored and self._parking.park(adapter, last_seq=last_seq):
            _log.info("adapter.parked_for_session", adapter=adapter, seq=last_seq)
