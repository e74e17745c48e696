"""The files of a job's tenant, in the journal and the object store."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound, TransientError, TwinkleError
from twinkle.core.ids import new_id
from twinkle.core.job import Job, JobFailed
from twinkle.storage.blobs import FILES, BlobStore, day_of
from twinkle.storage.files.growing import id_of_job_s_file
from twinkle.storage.files.reading import stretches_of
from twinkle.storage.files.records import ContentFacts, FilePiece, NewFile, StoredFile
from twinkle.storage.stores import Stores
from twinkle.wire.jsonl import LineSplitter

T = TypeVar("T")

MAX_WHOLE_BYTES = 64 * 2**20
"""Of a file that is read as a whole."""
_PIECE_BYTES = 8 * 2**20


class StoredFiles:
    """See :class:`twinkle.jobs.files.JobFiles`. Lives on one event loop; what blocks is done by threads."""

    def __init__(self, job: Job, stores: Stores, blobs: BlobStore, clock: Clock) -> None:
        self._job = job
        self._stores = stores
        self._blobs = blobs
        self._clock = clock

    async def find(self, file_id: str) -> StoredFile:
        """A file of the job's tenant.

        Raises:
            JobFailed: There is none, or it is another tenant's.
        """
        return await _told(asyncio.to_thread(self._stores.files.find, file_id, self._job.tenant))

    async def lines(self, file_id: str, *, start: int = 0) -> AsyncIterator[bytes]:
        """See :meth:`twinkle.jobs.files.JobFiles.lines`: blank ones too, and the first bytes of very long ones."""
        splitter = LineSplitter(keep_blank=True)
        async for stretch in self.stretches(file_id):
            for line in splitter.feed(stretch):
                if line.number > start:
                    yield line.data
        for line in splitter.end():
            if line.number > start:
                yield line.data

    async def stretches(self, file_id: str) -> AsyncIterator[bytes]:
        """A file's bytes, a stretch at a time.

        Raises:
            JobFailed: There is no such file, or it is another tenant's; transient where a store did not answer.
        """
        file = await self.find(file_id)
        pieces = await _told(asyncio.to_thread(self._stores.files.pieces, file))
        stretches = stretches_of(self._blobs, pieces)
        while (stretch := await _told(asyncio.to_thread(next, stretches, b""))) != b"":
            yield stretch

    async def read(self, file_id: str) -> bytes:
        """See :meth:`twinkle.jobs.files.JobFiles.read`."""
        file = await self.find(file_id)
        if file.size_bytes > MAX_WHOLE_BYTES:
            raise JobFailed(
                "file_too_large",
                f"{file_id} has {file.size_bytes} bytes; what is read as a whole may have {MAX_WHOLE_BYTES}",
                field="file",
            )
        return b"".join([stretch async for stretch in self.stretches(file_id)])

    async def write(self, name: str, content: bytes, *, purpose: str) -> str:
        """See :meth:`twinkle.jobs.files.JobFiles.write`."""
        new = self._new(name, purpose, keep_s=None)
        facts = ContentFacts(
            sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content), num_lines=content.count(b"\n")
        )
        return await _told(asyncio.to_thread(self._write, new, facts, content))

    async def write_part(self, name: str, part: str, content: bytes) -> None:
        """See :meth:`twinkle.jobs.files.JobFiles.write_part`."""
        await _told(asyncio.to_thread(self._write_part, name, part, content))

    async def join(self, name: str, parts: Sequence[str], *, purpose: str, keep_s: float | None = None) -> str:
        """See :meth:`twinkle.jobs.files.JobFiles.join`."""
        return await _told(asyncio.to_thread(self._join, self._new(name, purpose, keep_s=keep_s), parts))

    def _new(self, name: str, purpose: str, *, keep_s: float | None) -> NewFile:
        return NewFile(
            id=id_of_job_s_file(self._job.id, name),
            tenant=self._job.tenant,
            purpose=purpose,
            name=name,
            expires_at=None if keep_s is None else self._clock.now() + keep_s,
        )

    def _write(self, new: NewFile, facts: ContentFacts, content: bytes) -> str:
        return self._stores.files.add(new, facts, self._put(content)).id

    def _write_part(self, name: str, part: str, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        self._stores.growing_files.keep(self._job.id, self._job.tenant, name, part, self._put(content), digest=digest)

    def _join(self, new: NewFile, parts: Sequence[str]) -> str:
        try:
            return self._stores.files.find(new.id, new.tenant).id
        except NotFound:
            pieces = self._stores.growing_files.pieces(self._job.id, new.name, parts)
        digest, num_lines = hashlib.sha256(), 0
        for stretch in stretches_of(self._blobs, pieces):
            digest.update(stretch)
            num_lines += stretch.count(b"\n")
        size_bytes = sum(piece.size_bytes for piece in pieces)
        facts = ContentFacts(sha256=digest.hexdigest(), size_bytes=size_bytes, num_lines=num_lines)
        return self._stores.growing_files.join(self._job.id, new, parts, facts).id

    def _put(self, content: bytes) -> list[FilePiece]:
        folder = f"{FILES}{day_of(self._clock.now())}/{new_id()}"
        pieces = []
        for number, start in enumerate(range(0, len(content), _PIECE_BYTES)):
            data = content[start : start + _PIECE_BYTES]
            self._blobs.put(f"{folder}/{number:06d}", data)
            pieces.append(FilePiece(key=f"{folder}/{number:06d}", size_bytes=len(data)))
        return pieces


async def _told(call: Awaitable[T]) -> T:
    """What comes of a call; our own errors are said as jobs say them."""
    try:
        return await call
    except NotFound as error:
        raise JobFailed("file_not_found", error.message, field="file") from error
    except TwinkleError as error:
        raise JobFailed(error.code, error.message, is_transient=isinstance(error, TransientError)) from error
