"""Adapters whose client has gone leave the device: snapshotted, then evicted. The next operation brings them back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.scheduler.retry import PutOff
from twinkle.storage.adapters.adapters import Adapters
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.engine import State
from twinkle.workers.steps import Job, LaneJobs, Steps

_LOOK_EVERY_S = 5.0
_MAX_AT_ONCE = 4

_log = structlog.get_logger()


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
        self._next_look_at = now + _LOOK_EVERY_S
        others = [*self._residents.used(within_s=self._silent_s), *self._failed.waiting(), *besides]
        try:
            abandoned = self._adapters.abandoned(
                self._mesh, silent_s=self._silent_s, besides=others, limit=_MAX_AT_ONCE
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
