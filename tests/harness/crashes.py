"""The other end of ``twinkle.core.crash``: arms the named points of a running service."""

from __future__ import annotations

from pathlib import Path

from harness.polling import wait_until
from twinkle.core.crash import VARIABLE


class Crashes:
    """The folder in which points are armed. Give :attr:`variables` to the service's environment."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: str(self._folder)}

    def arm(self, point: str, *, count: int = 1, signal: str = "KILL") -> None:
        """The process that comes by for the ``count``-th time gets the signal."""
        self._fired(point).unlink(missing_ok=True)
        fresh = self._folder / f".{point}.new"
        fresh.write_text(f"{count} {signal}")
        fresh.replace(self._folder / point)

    def disarm(self, point: str) -> None:
        (self._folder / point).unlink(missing_ok=True)

    def has_fired(self, point: str) -> bool:
        return self._fired(point).exists()

    def wait(self, point: str, *, deadline_s: float = 30.0) -> float:
        """Wait until it has fired; when that was, in Unix seconds."""
        wait_until(lambda: self.has_fired(point), what=f"somebody comes by {point}", deadline_s=deadline_s)
        return self._fired(point).stat().st_ctime

    def _fired(self, point: str) -> Path:
        return self._folder / f"{point}.fired"
