"""Folders of the server's disk that the operator has opened: read through links only as long as these stay inside."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from twinkle.core.errors import InvalidInput, TooLarge

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe in the place of a file must not be waited for.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PIECE_BYTES = 2**20

_MAX_DIGESTS = 256

_Signature = tuple[tuple[int, ...], ...]
"""What tells files from those that take their places: device, number, size and times of each."""


def place_in(path: str, folders: Sequence[str]) -> tuple[str, str] | None:
    """The opened folder that a path lies in, and the way from there, links followed; ``None`` outside of all."""
    meant = os.path.realpath(path)
    for folder in folders:
        root = os.path.realpath(folder)
        if meant == root or meant.startswith(root.rstrip(os.sep) + os.sep):
            return root, os.path.relpath(meant, root)
    return None


class OpenedFolders:
    """Reads some files of folders below those that are open. Its methods block; any thread may call."""

    def __init__(self, folders: Sequence[str], *, names: Sequence[str], max_bytes: int) -> None:
        """Touch nothing yet.

        Args:
            folders: Those that the operator has opened.
            names: Of the files that are read, all of which must be there.
            max_bytes: What they may have together.
        """
        self._folders = tuple(folders)
        self._names = tuple(names)
        self._max_bytes = max_bytes
        self._one_at_a_time = threading.Lock()
        self._digests: OrderedDict[str, tuple[_Signature, str]] = OrderedDict()

    @property
    def are_any(self) -> bool:
        """Whether there are such folders."""
        return bool(self._folders)

    def digest(self, path: str, *, field: str) -> str:
        """What tells the content of a folder's files from any other; they are read anew only when they have changed.

        Raises:
            InvalidInput: As :meth:`read` does.
            TooLarge: The same.
        """
        opened = self._open_all(path, field)
        try:
            signature = _signature(opened.values())
        finally:
            _close(opened.values())
        seen = self._digests.get(path)
        if seen is not None and seen[0] == signature:
            return seen[1]
        return digest_of(self.read(path, field=field))

    def read(self, path: str, *, field: str) -> dict[str, bytes]:
        """A folder's files, all as they were at one time.

        Args:
            path: Of the folder; absolute.
            field: What the caller calls it.

        Raises:
            InvalidInput: It lies outside, or is no folder with these files, or they change while they are read.
            TooLarge: They have more bytes than is allowed.
        """
        # So that no more than one folder's content is added to what the process holds.
        with self._one_at_a_time:
            opened = self._open_all(path, field)
            try:
                before = _signature(opened.values())
                size_bytes = sum(os.fstat(file).st_size for file in opened.values())
                if size_bytes > self._max_bytes:
                    raise TooLarge(
                        f"{field}: {path} has {size_bytes} bytes, and at most {self._max_bytes} are taken from a"
                        " folder; ask the operator for more (TWINKLE_LOAD_FOLDER_BYTES)"
                    )
                files = {name: _read(file, self._max_bytes) for name, file in opened.items()}
                if _signature(opened.values()) != before:
                    raise InvalidInput(field, f"{path} changed while it was read; send the call again when it is whole")
            finally:
                _close(opened.values())
        self._digests[path] = (before, digest_of(files))
        while len(self._digests) > _MAX_DIGESTS:
            self._digests.popitem(last=False)
        return files

    def _open_all(self, path: str, field: str) -> dict[str, int]:
        opened: dict[str, int] = {}
        try:
            for name in self._names:
                opened[name] = _open(path, name, self._folders, field)
        except BaseException:
            _close(opened.values())
            raise
        return opened


def digest_of(files: Mapping[str, bytes]) -> str:
    """The SHA-256 of files and their names."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(f"{name} {len(content)} ".encode())
        found.update(content)
    return found.hexdigest()


def _open(path: str, name: str, folders: Sequence[str], field: str) -> int:
    # Whether there is something outside is nobody's business: the folder is judged before its file is looked for.
    if place_in(path, folders) is None:
        raise InvalidInput(field, f"{path[:300]} lies outside of the folders that the operator has opened for loading")
    place = place_in(os.path.join(path, name), folders)
    if place is None:
        raise InvalidInput(field, f"{name} of {path} is a link that leads out of the folders that are opened")
    try:
        file = _walk(*place)
    except OSError as error:
        raise InvalidInput(field, f"{path} is no folder with a readable {name}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InvalidInput(field, f"{name} of {path} is no file")
    return file


def _walk(root: str, way: str) -> int:
    """Open what lies there, part by part: a link that came into the way since is not followed."""
    *parts, last = way.split(os.sep)
    folder = os.open(root, _FOLDER)
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(last, _FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _read(file: int, max_bytes: int) -> bytes:
    pieces, num_bytes = [], 0
    while piece := os.read(file, _PIECE_BYTES):
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            break
    return b"".join(pieces)


def _signature(files: Iterable[int]) -> _Signature:
    found = []
    for file in files:
        status = os.fstat(file)
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)


def _close(files: Iterable[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)
