"""Files: brought to the server in parts that stay when the line breaks, or not at all where it has their bytes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, urlencode

from twinkle.client.bodies import make_body, read_answer
from twinkle.client.connection import Connection
from twinkle.client.errors import InvalidInput, TransientError
from twinkle.client.facade import Facade, blocking
from twinkle.client.transport import NATIVE_PREFIX, Request
from twinkle.wire.bodies.files import FileInfo, FilesResponse, OpenUploadRequest, OpenUploadResponse, PartInfo

PART_BYTES = 16 * 2**20
"""What is sent at once; the same each time, so that parts of a broken upload fit."""
_READ_BYTES = 2**20
_DOWNLOAD_BYTES = 8 * 2**20
_COMPLETE_TIMEOUT_S = 900.0
"""The server reads the whole file once more."""
_BYTES = "application/octet-stream"
_FILES = f"{NATIVE_PREFIX}/files"
_UPLOADS = f"{NATIVE_PREFIX}/uploads"

Progress: TypeAlias = Callable[[int, int], None]
"""Told how many bytes of how many are there."""


class AsyncFiles:
    """A tenant's files: ``client.files`` of an asynchronous client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def upload(
        self,
        path: str | os.PathLike[str],
        *,
        purpose: str = "fine-tune",
        name: str | None = None,
        expires_after_s: int | None = None,
        progress: Progress | None = None,
    ) -> FileInfo:
        """Bring a file to the server. Again, after a broken line or a killed process, only what is missing is sent.

        Args:
            path: The file, of any size.
            purpose: ``fine-tune``, ``batch``, ``user_data`` or ``evals``.
            name: What it is called there; its suffix says what it is.
            expires_after_s: How long it stays; without it until it is deleted.
            progress: Told how far it is.

        Raises:
            InvalidInput: The server takes no such file, or it changed while it was read.
            LimitReached: There is no room for it.
        """
        local = Path(path)
        size_bytes, sha256 = await asyncio.to_thread(_look_at, local)
        body = make_body(
            OpenUploadRequest,
            filename=name or local.name,
            size_bytes=size_bytes,
            sha256=sha256,
            purpose=purpose,
            expires_after_s=expires_after_s,
        )
        opened = await self._connection.ask(_UPLOADS, OpenUploadResponse, body)
        tell = progress or _tell_nobody
        if opened.file is not None:
            tell(size_bytes, size_bytes)
            return opened.file
        assert opened.upload_id is not None, "the server says one of the two"
        there = {part.number: part for part in opened.parts}
        num_sent = sum(part.size_bytes for part in opened.parts)
        tell(num_sent, size_bytes)
        for number, start in enumerate(range(0, size_bytes, PART_BYTES)):
            if number not in there:
                num_sent += await self._send_part(opened.upload_id, local, number, start)
                tell(num_sent, size_bytes)
        request = Request(path=f"{_UPLOADS}/{opened.upload_id}/complete", read_timeout_s=_COMPLETE_TIMEOUT_S)
        return read_answer(FileInfo, await self._connection.transport.send(request))

    async def _send_part(self, upload_id: str, path: Path, number: int, start: int) -> int:
        data = await asyncio.to_thread(_read, path, start)
        request = Request(
            path=f"{_UPLOADS}/{upload_id}/parts/{number}", method="PUT", content=data, content_type=_BYTES
        )
        part = read_answer(PartInfo, await self._connection.transport.submit(request))
        return part.size_bytes

    async def page(self, *, limit: int = 100, after: str | None = None, purpose: str | None = None) -> FilesResponse:
        """Files, the newest first; ``after`` is the id of the last one of the page before."""
        query: dict[str, str | int] = {"limit": limit}
        query |= {name: value for name, value in (("after", after), ("purpose", purpose)) if value is not None}
        return await self._connection.ask(f"{_FILES}?{urlencode(query)}", FilesResponse)

    async def show(self, file_id: str) -> FileInfo:
        """One file.

        Raises:
            NotFound: There is none, or it is another tenant's.
        """
        return await self._connection.ask(_path(file_id), FileInfo)

    async def download(
        self, file_id: str, path: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> FileInfo:
        """Bring a file here; what an earlier attempt has brought beside it (``.part``) is gone on from.

        Raises:
            NotFound: There is none, or it is another tenant's.
            TransientError: What came is not what the server has; do it again.
        """
        file = await self.show(file_id)
        target = Path(path)
        part = target.with_name(f"{target.name}.{file.sha256[:16]}.part")
        start = part.stat().st_size if part.exists() else 0
        while start < file.size_bytes:
            end = min(start + _DOWNLOAD_BYTES, file.size_bytes)
            request = Request(
                path=f"{_path(file_id)}/content", method="GET", headers={"Range": f"bytes={start}-{end - 1}"}
            )
            data = await self._connection.transport.send(request)
            await asyncio.to_thread(_append, part, data)
            start += len(data)
            (progress or _tell_nobody)(start, file.size_bytes)
        if await asyncio.to_thread(_look_at, part) != (file.size_bytes, file.sha256):
            part.unlink()
            raise TransientError(f"{file_id}: what came is not what the server has; download it again")
        part.replace(target)
        return file

    async def delete(self, file_id: str) -> None:
        """End a file; a job that reads it fails.

        Raises:
            NotFound: There is none, or it is another tenant's.
        """
        await self._connection.transport.send(Request(path=_path(file_id), method="DELETE"))


class Files(Facade[AsyncFiles]):
    """A tenant's files: ``client.files``."""

    upload = blocking(AsyncFiles.upload)
    page = blocking(AsyncFiles.page)
    show = blocking(AsyncFiles.show)
    download = blocking(AsyncFiles.download)
    delete = blocking(AsyncFiles.delete)


def _path(file_id: str) -> str:
    return f"{_FILES}/{quote(file_id, safe='')}"


def _look_at(path: Path) -> tuple[int, str]:
    """A file's size and digest."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
                size_bytes += len(data)
    except OSError as error:
        raise InvalidInput("path", f"{path} cannot be read: {error.strerror}") from error
    if not size_bytes:
        raise InvalidInput("path", f"{path} is empty")
    return size_bytes, digest.hexdigest()


def _read(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PART_BYTES)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _tell_nobody(_: int, __: int) -> None:
    return
