"""The folder of the embedded stack: one `twinkle serve` each, its logs, and the secrets in it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinkle.core.errors import ConfigError
from twinkle.storage.home import make_private_home

_LOGS = "logs"
_LOCK_FILE = "serve.lock"


def keep_private() -> None:
    """What this process and its children write from now on is for its owner's eyes only, wherever it lies."""
    os.umask(0o077)


def make_home(home: Path) -> Path:
    """Create the folder for its owner's eyes only, with room for logs.

    Returns:
        The folder, absolute.

    Raises:
        ConfigError: It cannot be made.
    """
    home = make_private_home(home)
    try:
        logs_of(home).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the home folder {home} cannot be used: {error.strerror}") from error
    return home


@contextmanager
def sole_owner(home: Path) -> Iterator[None]:
    """Hold the home for this process; the kernel lets go of it when the process ends, however it ends.

    Raises:
        ConfigError: Another process holds it.
    """
    with (home / _LOCK_FILE).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigError(
                f"another `twinkle serve` (pid {holder}) runs on {home}; stop it first, or choose another --home"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


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
