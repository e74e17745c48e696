"""Where rows lie that a script has made: in a folder of its own while it runs, or kept for the next run if it asks."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import time
import weakref
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import ClassVar

import datasets
from datasets.fingerprint import Hasher
from filelock import FileLock, Timeout

KEPT_DAYS = 30
"""Rows kept from an earlier run are removed when no run has read them for so long."""
_RUN_PREFIX = "run-"
_LOCK = "lock"


class Workspace:
    """A folder for one data set's rows, removed with it.

    A process that is killed leaves its folder behind; the next one removes what nobody holds the lock of any more.
    """

    _open: ClassVar[weakref.WeakSet[Workspace]] = weakref.WeakSet()

    def __init__(self) -> None:
        root = _root()
        _remove_abandoned(root)
        self.folder = Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir=root))
        lock = FileLock(self.folder / _LOCK)
        lock.acquire()
        self._count = 0
        self._open.add(self)
        self._end = weakref.finalize(self, _remove, self.folder, lock, os.getpid())

    @classmethod
    def bytes_held(cls) -> int:
        """What the files of all data sets of this process have."""
        return sum(bytes_below(workspace.folder) for workspace in list(cls._open))

    def new_file(self, suffix: str) -> Path:
        """A path that nothing has been written to yet."""
        self._count += 1
        return self.folder / f"{self._count}{suffix}"


def bytes_below(folder: Path) -> int:
    """The bytes of all files below a folder."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            status = path.lstat()
            num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return num_bytes


def kept_file(key: str) -> Path:
    """Where rows of this key are kept across runs; takes away what has not been read for long."""
    folder = _root() / "kept"
    folder.mkdir(exist_ok=True)
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for path in folder.iterdir():
        if path.name.startswith(f"{key}."):
            path.touch()
        elif path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
    return folder / f"{key}.arrow"


def key_of(*parts: object) -> str | None:
    """A key of everything that the rows made of ``parts`` depend on, or None where that cannot be told.

    Besides the values (and the code of functions and classes that a script itself defines) it covers every source file
    that this process has loaded from outside the installed packages, and the versions of those: a changed
    preprocessor, or a changed function that it calls, has another key.
    """
    digest = hashlib.sha256()
    try:
        for part in parts:
            digest.update(Hasher.hash(part).encode())
    except Exception:  # noqa: BLE001 - dill raises whatever an object's own pickling raises; then nothing is kept
        return None
    for path in _own_sources():
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for installed in sorted({f"{found.name}=={found.version}" for found in distributions()}):
        digest.update(installed.encode())
    return digest.hexdigest()


def _own_sources() -> list[Path]:
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = (Path(file) for file in files if file and file.endswith(".py") and not file.startswith(installed))
    return sorted(path for path in paths if path.is_file())


def _root() -> Path:
    root = Path(datasets.config.HF_DATASETS_CACHE) / "twinkle"
    root.mkdir(parents=True, exist_ok=True)
    return root


def _remove(folder: Path, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{_RUN_PREFIX}*"):
        lock = FileLock(folder / _LOCK)
        try:
            if time.time() - folder.stat().st_mtime < 60:
                continue  # being made
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
