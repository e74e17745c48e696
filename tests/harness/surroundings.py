"""A pytest plugin: tests see nothing of what a developer, or a CI, has set for other work.

A service's address, an account, a bucket, another database's password, the wish for colours: the processes that tests
start would inherit them all. What a test needs it sets itself.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import pytest

_PREFIXES = ("TWINKLE_", "TINKER_", "AWS_", "OPENAI_", "HF_", "CELERY_", "FLOWER_", "PG", "MASTER_", "TORCHELASTIC_")
_NAMES = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "COLUMNS", "LINES", "PYTHONWARNINGS", "PYTHONOPTIMIZE"}
_COLOURS = {"FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "GITHUB_ACTIONS"}
"""What makes a table be drawn as for a terminal."""
_INSTEAD = {
    # What other programs say is read by tests, in English and as UTF-8.
    "LC_ALL": "C.UTF-8",
    # A proxy stays, by which packages may come. All servers are on this machine.
    "NO_PROXY": "127.0.0.1,localhost,::1",
    "no_proxy": "127.0.0.1,localhost,::1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def pytest_configure(config: pytest.Config) -> None:
    """Before anything is collected, in each process that runs tests."""
    forget_other_work(os.environ)


def forget_other_work(environment: MutableMapping[str, str]) -> None:
    for name in list(environment):
        if name.startswith(_PREFIXES) or name in _NAMES | _COLOURS:
            del environment[name]
    environment.update(_INSTEAD)
