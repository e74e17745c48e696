"""Traces for whoever holds a signed URL; no key is asked for. Each is made from the journal while it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from twinkle.server.downloads import Expires
from twinkle.server.links import TRACES
from twinkle.server.openapi import BYTES, Access, Raw, described
from twinkle.server.session_trace import trace_of
from twinkle.server.state import Artifacts, Common, Queue
from twinkle.server.threads import Threads

router = APIRouter(prefix=TRACES)


@router.get(
    "/{session_id}.pftrace",
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
