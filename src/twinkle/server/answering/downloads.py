"""What whoever holds a signed URL downloads: files, archives and traces; no key is asked for.

A file is sent whole or, with a ``Range`` header, in part. Archives are tar files, which is how SDKs before 0.36
download checkpoints. Neither they nor traces are ever stored: they are put together while they are sent.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from twinkle.core.adapter import Checkpoint
from twinkle.core.errors import NotFound, StorageUnavailable
from twinkle.server.access.links import ARCHIVES, DOWNLOADS, TRACES, Given
from twinkle.server.answering.session_trace import trace_of
from twinkle.server.errors import refusal
from twinkle.server.openapi import BYTES, Access, Raw, described
from twinkle.server.state import Artifacts, Common, Queue
from twinkle.server.threads import Threads
from twinkle.wire.paths import SCHEME

Expires = Annotated[int, Query(ge=0, le=2**53)]
"""When a signed URL ends, in Unix seconds."""
Generation = Annotated[int, Query(ge=0, le=2**31 - 1)]
"""How often what was given out had been taken back when a signed URL was made."""

_PIECE_BYTES = 2**20
# What a route of files says of itself.
FILE = described(
    Raw(BYTES, "The file."),
    others={206: Raw(BYTES, "The part of it that was asked for.")},
    refusals=[403, 404, 416],
    headers=["Range"],
    access=Access.NONE,
)
COMPLETE = "checkpoint_complete"
"""The empty last member of an archive: `tinker checkpoint push-hf` takes one without it for a broken one."""
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)

router = APIRouter()


@dataclass(frozen=True)
class Part:
    """The bytes ``start`` to ``end`` of a file, ``end`` not included."""

    start: int
    end: int


@dataclass(frozen=True)
class Stored:
    """A whole file of the object store, as a stretch of what is sent."""

    key: str
    size_bytes: int


Stretch: TypeAlias = bytes | Stored


@router.get(DOWNLOADS + "/{content}/{name:path}", openapi_extra=FILE)
@router.head(DOWNLOADS + "/{content}/{name:path}", openapi_extra=FILE)
async def download(
    content: str,
    name: str,
    request: Request,
    common: Common,
    artifacts: Artifacts,
    generation: Generation,
    expires: Expires,
    signature: str,
) -> Response:
    """One file of a checkpoint, streamed, for as long as its owner does not take back what was given out."""
    given = Given(content=content, generation=generation, expires_at=expires, signature=signature)
    artifacts.links.check_file(name, given)
    checkpoint = await common.sql.run(artifacts.checkpoints.content, content)
    given.check_still(checkpoint)
    key = checkpoint.files[name].key
    try:
        size_bytes = await common.object_io.run(artifacts.blobs.size_bytes, key)
    except KeyError:
        raise NotFound("this file was deleted") from None
    return send_stretches(common, artifacts, request, [Stored(key, size_bytes)])


def send_stretches(common: Common, artifacts: Artifacts, request: Request, stretches: Sequence[Stretch]) -> Response:
    """A file made of stretches, one after the other, or the part of it that is asked for.

    Streamed in pieces: memory does not grow with the file.
    """
    size_bytes = sum(size_of(stretch) for stretch in stretches)
    asked = request.headers.get("range")
    part = None if asked is None else read_range(asked, size_bytes)
    headers = {"Accept-Ranges": "bytes", "Cache-Control": "private, no-store"}
    if part is not None and part.start >= part.end:
        headers["Content-Range"] = f"bytes */{size_bytes}"
        return refusal(416, f"the file has {size_bytes} bytes", "invalid_range", headers)
    status = 200 if part is None else 206
    if part is None:
        part = Part(0, size_bytes)
    else:
        headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{size_bytes}"
    headers["Content-Length"] = str(part.end - part.start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=BYTES)
    pieces = _pieces(common, artifacts, stretches, part)
    return StreamingResponse(pieces, status_code=status, headers=headers, media_type=BYTES)


def size_of(stretch: Stretch) -> int:
    """Its bytes."""
    return stretch.size_bytes if isinstance(stretch, Stored) else len(stretch)


def read_range(header: str, size_bytes: int) -> Part | None:
    """The part a ``Range`` header asks for (RFC 9110, 14.1.2), empty when the file ends before it.

    ``None`` for what may be answered with the whole file: several ranges, other units, nonsense.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        return Part(max(size_bytes - int(match[2]), 0), size_bytes)
    start = int(match[1])
    if match[2] and int(match[2]) < start:
        return None
    return Part(start, min(int(match[2]) + 1, size_bytes) if match[2] else size_bytes)


async def _pieces(
    common: Common, artifacts: Artifacts, stretches: Sequence[Stretch], part: Part
) -> AsyncIterator[bytes]:
    begins = 0
    for stretch in stretches:
        start = max(part.start - begins, 0)
        end = min(part.end - begins, size_of(stretch))
        begins += size_of(stretch)
        if isinstance(stretch, bytes):
            if start < end:
                yield stretch[start:end]
            continue
        for at in range(start, end, _PIECE_BYTES):
            length = min(_PIECE_BYTES, end - at)
            yield await common.object_io.run(artifacts.blobs.get_range, stretch.key, at, length)


@router.get(ARCHIVES + "/{run_id}/{segment}/{name}.tar", openapi_extra=FILE)
@router.head(ARCHIVES + "/{run_id}/{segment}/{name}.tar", openapi_extra=FILE)
async def archive(
    run_id: str,
    segment: str,
    name: str,
    request: Request,
    common: Common,
    artifacts: Artifacts,
    content: str,
    generation: Generation,
    expires: Expires,
    signature: str,
) -> Response:
    """The weights of a checkpoint, for as long as its owner does not take back what was given out."""
    path = f"{SCHEME}{run_id}/{segment}/{name}"
    given = Given(content=content, generation=generation, expires_at=expires, signature=signature)
    artifacts.links.check_archive(path, given)
    checkpoint = await common.sql.run(artifacts.checkpoints.content, content)
    given.check_still(checkpoint)
    stretches = lay_out(checkpoint)
    for stretch in stretches:
        if isinstance(stretch, Stored):
            await _check_stored(common, artifacts, stretch)
    return send_stretches(common, artifacts, request, stretches)


def lay_out(checkpoint: Checkpoint) -> list[Stretch]:
    """What an archive consists of: the files for whoever uses the adapter, not those for who trains it."""
    stretches: list[Stretch] = []
    for name, file in sorted(checkpoint.weight_files.items()):
        stretches += [_header(name, file.size_bytes), Stored(file.key, file.size_bytes), _padding(file.size_bytes)]
    stretches.append(_header(COMPLETE, 0))
    size_bytes = sum(size_of(stretch) for stretch in stretches) + 2 * tarfile.BLOCKSIZE
    stretches.append(bytes(2 * tarfile.BLOCKSIZE + -size_bytes % tarfile.RECORDSIZE))
    return stretches


def _header(name: str, size_bytes: int) -> bytes:
    # The time stays that of the epoch: a checkpoint that is saved again unchanged keeps its bytes.
    member = tarfile.TarInfo(name)
    member.size = size_bytes
    return member.tobuf(tarfile.PAX_FORMAT)


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


async def _check_stored(common: Common, artifacts: Artifacts, file: Stored) -> None:
    """Before the first byte is sent: afterwards a fault could only be told by breaking off."""
    try:
        size_bytes = await common.object_io.run(artifacts.blobs.size_bytes, file.key)
    except KeyError:
        raise NotFound("this checkpoint was deleted") from None
    if size_bytes != file.size_bytes:
        raise StorageUnavailable(f"{file.key} is not what was written: {size_bytes} of {file.size_bytes} bytes")


@router.get(
    TRACES + "/{session_id}.pftrace",
    openapi_extra=described(Raw(BYTES, "A Perfetto trace."), refusals=[403, 404], access=Access.NONE),
)
async def download_trace(
    session_id: str, common: Common, queue: Queue, artifacts: Artifacts, expires: Expires, signature: str
) -> Response:
    """A session's timeline as of now, streamed: neither it nor the session is ever in memory as a whole."""
    artifacts.links.check_trace(session_id, expires_at=expires, signature=signature)
    pieces = trace_of(queue.timeline, session_id, now=common.clock.now())
    # Before the first byte is sent: afterwards a fault could only be told by breaking off.
    first = await queue.trace_threads.run(next, pieces, b"")
    headers = {
        "Cache-Control": "private, no-store",
        "Content-Disposition": f'attachment; filename="{session_id}.pftrace"',
    }
    return StreamingResponse(_rest(queue.trace_threads, first, pieces), media_type=BYTES, headers=headers)


async def _rest(threads: Threads, piece: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece:
        yield piece
        piece = await threads.run(next, pieces, b"")
