"""Processes of the service import with the collector of garbage off, and run with it on."""

from __future__ import annotations

import gc
import subprocess
import sys

from twinkle.core.lazy import without_collector

SCRIPT = """
import gc, sys
from importlib.abc import MetaPathFinder
from twinkle.cli.app import app
from twinkle.core.settings import Settings
from twinkle.workers.process import build_engine

LARGE = {
    "serve": "twinkle.cli.serve",
    "server": "twinkle.server.run",
    "worker": "twinkle.workers.entry",
    "housekeeping": "twinkle.tasks.housekeeping",
    "jobs-worker": "twinkle.workers.jobs.process",
    "processors": "twinkle.workers.processors.serving",
    "engine": "twinkle.workers.ranks.engine",
}

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in LARGE.values():
            found.append((name, gc.isenabled()))
            raise ImportError(name)

found = []
sys.meta_path.insert(0, Watch())
for command in LARGE:
    try:
        build_engine(Settings()) if command == "engine" else app([command], standalone_mode=False)
    except ImportError:
        pass
    assert gc.isenabled()
assert found == [(module, False) for module in LARGE.values()], found
"""


def test_the_collector_is_behind_as_it_was_before() -> None:
    with without_collector():
        inside = gc.isenabled()
        with without_collector():
            pass
        nested = gc.isenabled()

    assert (inside, nested, gc.isenabled()) == (False, False, True)


def test_every_process_of_the_service_imports_what_is_large_without_looking_for_garbage() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
