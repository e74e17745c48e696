"""How the child that owns the device says that its settings are wrong: no restart would help, so the parent ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from twinkle.core.errors import ConfigError

REFUSAL_FILE = "_TWINKLE_REFUSAL_FILE"
"""The variable that names the file in which the parent finds the reason."""


def refuse(error: ConfigError) -> None:
    """Leave the reason for the parent and ask it to stop."""
    Path(os.environ[REFUSAL_FILE]).write_text(error.message)
    os.kill(os.getppid(), signal.SIGTERM)
