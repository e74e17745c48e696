"""A pytest plugin: files whose tests share a service run in one of the processes, one after the other.

Each process that runs tests starts what they share for itself. The files of a room whose tests ask for one service
would else be dealt out over all processes, and each would start that service, which takes longer than most of them.
And where such a process dies, the run goes on without it: another runs what it had not run yet.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

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
    """Deals out whole files, and those with a service in common together; after a death only what was not run yet.

    pytest-xdist 3.8 would deal out all that the process had been given: the test that it died of again, and files that
    were done, at which the next process waits for tests that never come.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Take what a process leaves; the test that it died in, if it did."""
        left = {
            scope: [nodeid for nodeid, is_done in tests.items() if not is_done]
            for scope, tests in self.assigned_work.pop(node).items()
        }
        died_in = next((nodeid for tests in left.values() for nodeid in tests), None)
        for scope, tests in left.items():
            if to_run := [nodeid for nodeid in tests if nodeid != died_in]:
                self.workqueue[scope] = dict.fromkeys(to_run, False)
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _assign_work_unit(self, node: WorkerController) -> None:
        # Where it has just died, its end is told next, and what it was given dealt out again.
        with suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # It takes the place of one that died, and comes by itself when it knows the tests.
        super()._reschedule(node)
        # A process begins a test when it knows of the next one.
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)

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
