"""The log of rooms that must run where structlog is not installed: a machine with a GPU may have torch and no more.

A record is a stable dotted event name and facts as fields, as everywhere else.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol


class EventLog(Protocol):
    """What a room logs to."""

    def info(self, event: str, **facts: object) -> object:
        """Something happened that an operator may want to know."""
        ...

    def warning(self, event: str, **facts: object) -> object:
        """Something happened that an operator should look at."""
        ...


class PlainLog:
    """An event log on the standard library's logging: one ``key=value`` line a record."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, event: str, **facts: object) -> None:
        """See :class:`EventLog`."""
        self._logger.info("%s %s", event, _fields(facts))

    def warning(self, event: str, **facts: object) -> None:
        """See :class:`EventLog`."""
        self._logger.warning("%s %s", event, _fields(facts))


def event_log() -> EventLog:
    """The log of the training library."""
    if find_spec("structlog") is None:
        return PlainLog("twinkle")
    log: EventLog = import_module("structlog").get_logger()
    return log


def _fields(facts: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())
