"""Processes of the service import only what they need, with the collector of garbage off, and run with it on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle.core.process.lazy import without_collector

SCRIPT = """
import gc, sys
from importlib.abc import MetaPathFinder
from twinkle.cli.app import app
from twinkle.core.settings import Settings
from twinkle.workers.process import build_engine

LARGE = {
    "serve": "twinkle.cli.embedded.serve",
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

COMPUTING = ("torch", "transformers", "peft", "datasets", "scipy", "pandas")
MIGRATING = ("alembic", "mako", "sqlalchemy", "sqlmodel")
OF_THE_API = ("fastapi", "starlette", "uvicorn")
WORKING = ("twinkle.storage.stores", "numpy", "google.protobuf")

LOADED = """
import sys
for module in sys.argv[1].split(","):
    __import__(module)
if "twinkle.storage.schema" in sys.modules:
    sys.modules["twinkle.storage.schema"].upgrade(sys.argv[2])
print(*(module for module in sys.argv[3].split(",") if module in sys.modules))
"""


@pytest.mark.parametrize(
    ("modules", "unneeded"),
    [
        ("twinkle.cli.app", (*COMPUTING, *MIGRATING, *OF_THE_API, *WORKING, "redis", "celery", "twinkle.storage")),
        ("twinkle.cli.embedded.serve", (*COMPUTING, *MIGRATING, *OF_THE_API, "numpy", "celery")),
        ("twinkle.cli.operator.keys", (*COMPUTING, *MIGRATING, *OF_THE_API, "numpy", "celery")),
        ("twinkle.server.run", (*COMPUTING, *MIGRATING)),
        ("twinkle.workers.entry,twinkle.workers.celery_app", (*COMPUTING, *MIGRATING, *OF_THE_API, *WORKING)),
        ("twinkle.workers.process", (*COMPUTING, *MIGRATING, *OF_THE_API)),
        ("twinkle.tasks.housekeeping", (*COMPUTING, *MIGRATING, *OF_THE_API, "numpy")),
        ("twinkle.workers.jobs.process", (*COMPUTING, *MIGRATING)),
        ("twinkle.workers.processors.serving", (*COMPUTING, *MIGRATING, *OF_THE_API)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_process_loads_nothing_that_others_need_on_a_journal_that_is_up_to_date(
    modules: str, unneeded: tuple[str, ...], tmp_path: Path, sqlite_url: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, modules, sqlite_url, ",".join(unneeded)],
        # What the worker's application reads when it is imported.
        env={
            **os.environ,
            "TWINKLE_HOME": str(tmp_path),
            "TWINKLE_MODEL_NAME": "m",
            "TWINKLE_REDIS_URL": "redis://127.0.0.1:1/0",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stdout.split() == []


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
