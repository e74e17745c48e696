"""A pytest plugin: files whose tests share a service run in one of the processes, one after the other.

Each process that runs tests starts what they share for itself. The files of a room whose tests ask for one service
would else be dealt out over all processes, and each would start that service, which takes longer than most of them.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SERVICES = [
    ("tests/fault", ("struck_model",)),
    ("tests/fault", ("struck",)),
    ("tests/acceptance", ("served",)),
    ("tests/acceptance/cookbook", ("served_as_qwen",)),
    ("tests/acceptance/seeds", ("service", "text_service")),
]
"""Services of a room's ``conftest.py``, by the names of their fixtures. Those that one file asks for are together."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return Together(config, log) if config.getoption("dist") == "loadfile" else None


class Together(LoadFileScheduling):
    """Deals out whole files, and those with a service in common together."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return self._groups.get(file, file)

    @cached_property
    def _groups(self) -> dict[str, str]:
        return groups_of(self.config.rootpath)


def groups_of(root: Path) -> dict[str, str]:
    """The group of each file whose tests share a service, as paths below ``root``."""
    groups: dict[str, str] = {}
    for room, services in SERVICES:
        for path in sorted((root / room).glob("test_*.py")):
            if any(_asks(path.read_text(), service) for service in services):
                groups.setdefault(path.relative_to(root).as_posix(), f"{room}: {services[0]}")
    return groups


def _asks(source: str, service: str) -> bool:
    """Whether a test or a fixture takes the service of the room, and not one that the file makes for itself."""
    has_own = re.search(rf"^def {service}\((?!{service}: )", source, re.MULTILINE)
    return has_own is None and re.search(rf"\b{service}: ", source) is not None
