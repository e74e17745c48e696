"""Files for whoever holds a signed URL; no key is asked for. Whole or, with a ``Range`` header, in part."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from twinkle.core.errors import NotFound
from twinkle.server.errors import refusal
from twinkle.server.links import DOWNLOADS, Given
from twinkle.server.openapi import BYTES, Access, Raw, described
from twinkle.server.state import Artifacts, Common

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
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)

router = APIRouter(prefix=DOWNLOADS)


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


@router.get("/{content}/{name:path}", openapi_extra=FILE)
@router.head("/{content}/{name:path}", openapi_extra=FILE)
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
    checkpoint = await common.sql.run(artifacts.catalog.content, content)
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
