"""Is it alive, can it do its work, and does the work move? No question needs a key."""

from __future__ import annotations

from typing import Literal, NotRequired

import orjson
from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from twinkle.core.errors import StorageUnavailable
from twinkle.core.processors import PROCESSORS_MESH
from twinkle.server.errors import JSON
from twinkle.server.openapi import Access, described
from twinkle.server.state import Artifacts, Common, Queue

router = APIRouter(prefix="/api/v1")


class Health(TypedDict):
    """How it stands, and why not better."""

    status: Literal["ok", "ready", "waiting", "live", "stalled", "unknown"]
    reasons: NotRequired[list[str]]


@router.get("/healthz", openapi_extra=described(Health, access=Access.NONE))
async def healthz() -> Response:
    """The process answers; nothing is said about what stands behind it."""
    return _answer(Health(status="ok"))


@router.get("/readyz", openapi_extra=described(Health, others={503: Health}, access=Access.NONE))
async def readyz(queue: Queue, artifacts: Artifacts) -> Response:
    """The journal and the object store answer and every mesh has a worker; else 503 with the reasons."""
    try:
        meshes = await queue.meshes.all()
    except StorageUnavailable:
        reasons = ["the journal's database does not answer"]
    else:
        # That of data sets and loaders is taken when there is something to do, and serves no model.
        serving = [mesh for mesh in meshes if mesh.name != PROCESSORS_MESH]
        reasons = [f"mesh {mesh.name!r} has no live worker" for mesh in serving if not mesh.alive]
        if not any(mesh.capabilities is not None for mesh in meshes):
            reasons.append("no worker has said yet what it serves")
    if not await artifacts.object_board.answers():
        reasons.append("the object store does not answer")
    return _answer(Health(status="waiting" if reasons else "ready", reasons=reasons), is_well=not reasons)


@router.get("/livez", openapi_extra=described(Health, others={503: Health}, access=Access.NONE))
async def livez(common: Common, queue: Queue, mesh: str | None = None) -> Response:
    """503 when work waits and nothing has moved for too long, on one mesh or any: for a worker's liveness probe.

    While the journal does not answer nobody can tell, and no worker is to blame: 200 then.
    """
    try:
        stalls = await queue.queue_board.stalls(after_s=common.settings.stall_s)
    except StorageUnavailable:
        return _answer(Health(status="unknown", reasons=[]))
    reasons = [
        f"on mesh {stall.mesh!r} an operation waits for {stall.waits_s:.0f} s and nothing has moved"
        f" for {common.settings.stall_s:.0f} s"
        for stall in stalls
        if mesh in {None, stall.mesh}
    ]
    return _answer(Health(status="stalled" if reasons else "live", reasons=reasons), is_well=not reasons)


def _answer(health: Health, *, is_well: bool = True) -> Response:
    return Response(orjson.dumps(health), status_code=200 if is_well else 503, media_type=JSON)
