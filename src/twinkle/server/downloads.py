"""Files for whoever holds a signed URL; no key is asked for. Whole or, with a ``Range`` header, in part."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from twinkle.core.errors import NotFound
from twinkle.server.errors import refusal
from twinkle.server.links import DOWNLOADS
from twinkle.server.openapi import BYTES, Access, Raw, described
from twinkle.server.state import Server, ServerState

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


@router.get("/{key:path}", openapi_extra=FILE)
@router.head("/{key:path}", openapi_extra=FILE)
async def download(
    key: str, request: Request, server: Server, expires: Annotated[int, Query(ge=0, le=2**53)], signature: str
) -> Response:
    """One stored file, streamed."""
    server.links.check(key, expires_at=expires, signature=signature)
    try:
        size_bytes = await server.object_io.run(server.blobs.size_bytes, key)
    except (KeyError, ValueError):
        raise NotFound("this file was deleted") from None
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
    return StreamingResponse(_pieces(server, key, part), status_code=status, headers=headers, media_type=BYTES)


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


async def _pieces(server: ServerState, key: str, part: Part) -> AsyncIterator[bytes]:
    for start in range(part.start, part.end, _PIECE_BYTES):
        length = min(_PIECE_BYTES, part.end - start)
        yield await server.object_io.run(server.blobs.get_range, key, start, length)
