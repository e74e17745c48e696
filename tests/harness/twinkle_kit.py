"""The package `twinkle-kit` with its own client, in a virtual environment of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.environment import overlaid_python
from harness.sdk_command_line import printed, start_sdk

VERSION = "0.5.1"
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("twinkle_kit_script.py")


@dataclass(frozen=True)
class Exercise:
    """What the client saw when each of its methods was called once."""

    seen: dict[str, Any]
    refused: dict[str, str]
    """What was to be refused and was, with the words."""
    calls: frozenset[str]
    """What was asked for, as ``METHOD path`` and the function of a processor; names are braced."""


def twinkle_kit_python() -> Path:
    """Returns the Python that has `twinkle-kit`; makes its environment first (seven seconds) when there is none."""
    requirement = f"twinkle-kit=={VERSION}"
    cache = REPOSITORY / ".cache" / f"twinkle-kit-{VERSION}-venv"
    return overlaid_python(cache, install=(requirement,), made_from=requirement)


def exercise(url: str, key: str, model_name: str, home: Path) -> Exercise:
    """Calls every method of that client once.

    Args:
        url: The service's.
        key: Of a tenant.
        model_name: One that it serves.
        home: An empty folder.

    Raises:
        AssertionError: A call failed that should not have; holds what was said.
    """
    command: list[str | Path] = [twinkle_kit_python(), SCRIPT, url, key, model_name]
    done = start_sdk(command, base_url=url, api_key=key, home=home, timeout_s=240)
    told = json.loads(printed(done).splitlines()[-1])
    return Exercise(told["seen"], told["refused"], frozenset(told["calls"]))
