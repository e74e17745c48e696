"""The folder of the embedded stack, for its owner's eyes only, whichever process comes to it first."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from twinkle.core.errors import ConfigError

_JOURNAL_FILES = ("journal.db", "journal.db-wal", "journal.db-shm")


def make_private_home(home: Path) -> Path:
    """Create the folder, or take from others what an earlier version left open to them.

    Returns:
        The folder, absolute.

    Raises:
        ConfigError: It cannot be made, or is somebody else's.
    """
    home = home.absolute()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        close_home(home)
    except OSError as error:
        raise ConfigError(f"the home folder {home} cannot be used: {error.strerror}") from error
    return home


def close_home(home: Path) -> None:
    """Let nobody but its owner into the folder and the journal's files.

    Raises:
        OSError: It is somebody else's.
    """
    if home.stat().st_mode & 0o077:
        home.chmod(0o700)
    for name in _JOURNAL_FILES:
        with suppress(FileNotFoundError):
            if (home / name).stat().st_mode & 0o077:
                (home / name).chmod(0o600)
