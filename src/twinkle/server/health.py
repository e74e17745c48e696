"""Is it alive, and can it do its work? Neither question needs a key."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Response

from twinkle.core.errors import StorageUnavailable
from twinkle.server.errors import JSON
from twinkle.server.state import Server

router = APIRouter(prefix="/api/v1")


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers; nothing is said about what stands behind it."""
    return Response(b'{"status":"ok"}', media_type=JSON)


@router.get("/readyz")
async def readyz(server: Server) -> Response:
    """The journal answers and every mesh has a worker; else 503 with the reasons."""
    try:
        meshes = await server.meshes.all()
    except StorageUnavailable:
        reasons = ["the journal's database does not answer"]
    else:
        reasons = [f"mesh {mesh.name!r} has no live worker" for mesh in meshes if not mesh.alive]
        if not any(mesh.capabilities is not None for mesh in meshes):
            reasons.append("no worker has said yet what it serves")
    answer = {"status": "waiting" if reasons else "ready", "reasons": reasons}
    return Response(orjson.dumps(answer), status_code=503 if reasons else 200, media_type=JSON)
