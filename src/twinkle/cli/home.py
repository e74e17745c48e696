"""The folder of the embedded stack, and the secrets in it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from twinkle.core.errors import ConfigError

_LOGS = "logs"


def make_home(home: Path) -> Path:
    """Create the folder for its owner's eyes only, with room for logs.

    Returns:
        The folder, absolute.

    Raises:
        ConfigError: It cannot be made.
    """
    home = home.absolute()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
        logs_of(home).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the home folder {home} cannot be used: {error.strerror}") from error
    return home


def logs_of(home: Path) -> Path:
    """Where the children's output goes."""
    return home / _LOGS


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read; it is never readable by others, not even for a moment."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.replace(path)


def kept_password(path: Path) -> str:
    """The password in a file, made on first use."""
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(18) + "\n")
    return path.read_text().strip()
