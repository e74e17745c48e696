"""Sending what a training records to the tools that people watch it with. Their failure never stops training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.metric.forwarders import FORWARDERS, Forwarder, package_of
from twinkle.metric.forwarding_thread import GOES_ON, ForwardingThread
from twinkle.metric.records import STEP, Record

log = event_log()


class Forwarding:
    """The forwarders of one adapter. One that fails is told once and gets nothing more."""

    def __init__(self) -> None:
        self._active: list[tuple[str, Forwarder]] = []

    def add(self, forwarder: str | Forwarder, settings: Mapping[str, Any]) -> None:
        """Open a forwarder by name, in a thread of its own, or take one, which is called where training goes on.

        One that cannot be opened is told and left out.

        Raises:
            InvalidInput: The name is unknown.
        """
        if not isinstance(forwarder, str):
            self._active.append((type(forwarder).__name__, forwarder))
            return
        if forwarder not in FORWARDERS:
            raise InvalidInput("forwarder", f"{forwarder!r} is not known; use one of {', '.join(FORWARDERS)}")
        if not self._attempt(forwarder, lambda: package_of(forwarder)):
            return
        thread = ForwardingThread(forwarder, partial(FORWARDERS[forwarder], **settings))
        if not thread.has_ended:
            self._active.append((forwarder, thread))

    def send(self, record: Record) -> None:
        """Send a record's numbers, under ``train/`` or ``eval/`` where their names say nothing of the kind."""
        numbers = _named(record)
        for name, forwarder in list(self._active):
            if not self._attempt(name, partial(forwarder.log, numbers, record.step)):
                self._active.remove((name, forwarder))

    def close(self) -> None:
        """End every forwarder's run."""
        for name, forwarder in self._active:
            self._attempt(name, forwarder.close)
        self._active.clear()

    def names(self) -> Sequence[str]:
        """Those that are open."""
        return [name for name, _ in self._active]

    @staticmethod
    def _attempt(name: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a tool's server or files provoke must not end a training
            said = f"{type(error).__name__}: {error}"
            log.warning("metric.forwarding.failed", forwarder=name, error=said, next=GOES_ON)
            return False
        return True


def _named(record: Record) -> dict[str, float]:
    phase = "train" if record.kind == STEP else record.kind
    return {
        name if "/" in name else f"{phase}/{name}": value
        for name, value in record.values.items()
        if isinstance(value, float)
    }
