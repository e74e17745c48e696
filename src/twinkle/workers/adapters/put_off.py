"""What could not be done for one adapter is tried again, each time later: what was wrong may have passed."""

from __future__ import annotations

from typing import Generic, TypeVar

from twinkle.core.clock import Clock

_FIRST_S = 300.0
_LONGEST_S = 3600.0

_Key = TypeVar("_Key")


class PutOff(Generic[_Key]):
    """What was tried in vain, how often, and from when on it may be tried again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: dict[_Key, tuple[int, float]] = {}

    def put_off(self, key: _Key) -> dict[str, object]:
        """It has failed; the facts of that for the log: how often by now, and what comes next."""
        num_failures = self._failed.get(key, (0, 0.0))[0] + 1
        pause_s = min(_FIRST_S * 2 ** (num_failures - 1), _LONGEST_S)
        self._failed[key] = num_failures, self._clock.now() + pause_s
        return {"failures": num_failures, "next": f"it is left as it is, and tried again in {pause_s:.0f} s"}

    def forget(self, key: _Key) -> None:
        """It was done."""
        self._failed.pop(key, None)

    def waiting(self) -> set[_Key]:
        """What is not to be tried yet. Nobody tries what is gone: it is forgotten a while after it might have been."""
        now = self._clock.now()
        self._failed = {key: failed for key, failed in self._failed.items() if now < failed[1] + 2 * _LONGEST_S}
        return {key for key, (_, again_at) in self._failed.items() if now < again_at}
