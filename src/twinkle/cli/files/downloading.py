"""Files brought to this machine: in pieces, from where a broken download ended, and checked as a whole."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import httpx

from twinkle.client.endpoint import Endpoint
from twinkle.core.errors import ConfigError, StorageUnavailable

_PIECE_BYTES = 2**20
_TIMEOUT_S = 60.0
_MAX_FAILURES = 6
_PAUSE_S = 1.0
_OK, _PART = 200, 206


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file of the tenant's, where it is to lie here, and what it is to be."""

    file: str
    path: str
    size_bytes: int
    sha256: str


def download(endpoint: Endpoint, wanted: Download, folder: Path, *, pause_s: float = _PAUSE_S) -> bool:
    """Bring a file into a folder; whether anything had to be sent. It has its name once it is whole.

    Raises:
        ConfigError: The server names a place outside of the folder, or does not give the file.
        StorageUnavailable: It broke off time and again, or is not what was told.
    """
    target = _place(folder, wanted.path)
    if target.is_file() and _is_whole(target, wanted):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    failures = 0
    with httpx.Client(
        base_url=endpoint.url, headers={"X-API-Key": endpoint.api_key.get_secret_value()}, timeout=_TIMEOUT_S
    ) as http:
        part.touch()
        while (before := part.stat().st_size) < wanted.size_bytes:
            try:
                _fetch(http, wanted, part, start=before)
            except httpx.TransportError as error:
                # What came counts: only standing still makes it give up.
                failures = 0 if part.stat().st_size > before else failures + 1
                if failures >= _MAX_FAILURES:
                    raise StorageUnavailable(
                        f"{wanted.path}: {error}; the same command goes on where it ended"
                    ) from error
                time.sleep(pause_s * 2**failures)
    if not _is_whole(part, wanted):
        part.unlink()
        raise StorageUnavailable(f"{wanted.path} came with other bytes than were written; run the same command again")
    part.rename(target)
    return True


def _fetch(http: httpx.Client, wanted: Download, part: Path, *, start: int) -> None:
    """Append what is missing."""
    path = f"/v1/files/{quote(wanted.file, safe='')}/content"
    with http.stream("GET", path, headers={"Range": f"bytes={start}-"} if start else {}) as answer:
        if answer.status_code not in (_OK, _PART):
            answer.read()
            raise ConfigError(f"{wanted.path}: the server answers {answer.status_code}: {answer.text[:200]}")
        with part.open("ab" if answer.status_code == _PART else "wb") as file:
            for piece in answer.iter_bytes(_PIECE_BYTES):
                file.write(piece)


def _is_whole(path: Path, wanted: Download) -> bool:
    if path.stat().st_size != wanted.size_bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest() == wanted.sha256


def _place(folder: Path, path: str) -> Path:
    parts = PurePosixPath(path).parts
    if not parts or PurePosixPath(path).is_absolute() or ".." in parts:
        raise ConfigError(f"the server names {path!r}, which is no place within {folder}")
    return folder.joinpath(*parts)
