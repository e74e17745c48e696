"""Is it alive, can it do its work, and does the work move? No question needs a key."""

from __future__ import annotations

from functools import partial

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


@router.get("/livez")
async def livez(server: Server, mesh: str | None = None) -> Response:
    """503 when work waits and nothing has moved for too long, on one mesh or any: for a worker's liveness probe.

    While the journal does not answer nobody can tell, and no worker is to blame: 200 then.
    """
    try:
        stalls = await server.sql.run(partial(server.progress.stalls, after_s=server.settings.stall_s))
    except StorageUnavailable:
        return Response(b'{"status":"unknown","reasons":[]}', media_type=JSON)
    reasons = [
        f"on mesh {stall.mesh!r} an operation waits for {stall.waits_s:.0f} s and nothing has moved"
        f" for {server.settings.stall_s:.0f} s"
        for stall in stalls
        if mesh in {None, stall.mesh}
    ]
    answer = {"status": "stalled" if reasons else "live", "reasons": reasons}
    return Response(orjson.dumps(answer), status_code=503 if reasons else 200, media_type=JSON)
