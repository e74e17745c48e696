"""The token of a Ray cluster, which `ray start` asks for unasked where ``~/.ray/auth_token`` lies (Ray 2.60)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from twinkle.core.process.answering import is_answered

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN_HINT = (
    f"if it asks for a token, the one that lies on its head in ~/.ray/auth_token must lie here too, or be named by"
    f" {TOKEN_PATH}, and {MODE}=token be set"
)
"""Of a Ray cluster that answers and cannot be joined."""

_ANSWERS_S = 2.0
_ASKED_S = 60.0


def take_token(address: str | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Before Ray is imported: let this process and its children show the token that lies here, if a cluster asks.

    Ray shows it unasked to a cluster that it has found by itself, and to none that is named. To one without a token it
    must not be shown: the driver would refuse its actors. Whoever has set ``RAY_AUTH_MODE`` has decided. Blocks for
    some seconds where a token lies here, and not at all elsewhere.

    Args:
        address: Of a cluster, ``HOST:PORT``; of one that Ray is to find, ``auto`` or nothing.
        environment: Of this process.
    """
    # Ray has read its mode when it was imported.
    if address in (None, "", "auto") or MODE in environment or "ray" in sys.modules or not _has_token(environment):
        return
    if is_answered(str(address), timeout_s=_ANSWERS_S) and _asks_for_token(str(address), environment):
        environment[MODE] = "token"


def _has_token(environment: Mapping[str, str]) -> bool:
    named = environment.get(TOKEN_PATH)
    return TOKEN in environment or Path(named or "~/.ray/auth_token").expanduser().is_file()


def _asks_for_token(address: str, environment: Mapping[str, str]) -> bool:
    """Ask without it, in a process of its own, which may import Ray."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        asked = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_ASKED_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode != 0 and "AuthenticationError" in asked.stderr
