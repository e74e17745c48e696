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
from twinkle.storage.journal.meshes import MeshStatus

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
async def readyz(queue: Queue, artifacts: Artifacts, mesh: str | None = None) -> Response:
    """The journal and the object store answer and every mesh has a worker; else 503 with the reasons.

    A mesh is known once a worker of it was started or asked for. Whoever names one asks for that one alone: 503 as long
    as it has had none.
    """
    try:
        meshes = await queue.meshes.all()
    except StorageUnavailable:
        reasons = ["the journal's database does not answer"]
    else:
        asked = [each for each in meshes if _is_to_serve(each)] if mesh is None else []
        asked += [each for each in meshes if each.name == mesh]
        reasons = [f"mesh {each.name!r} has no live worker" for each in asked if not _serves(each)]
        if not any(each.capabilities is not None for each in (asked if mesh else meshes)):
            reasons.append(f"no worker{f' of mesh {mesh!r}' if mesh else ''} has said yet what it serves")
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


def _is_to_serve(mesh: MeshStatus) -> bool:
    """Not so that of data sets and loaders, taken when there is something to do, and one that has been emptied."""
    return mesh.name != PROCESSORS_MESH and not (mesh.is_draining and not mesh.num_adapters)


def _serves(mesh: MeshStatus) -> bool:
    """Its worker holds it, and has said what it can do, which is a moment later."""
    return mesh.alive and mesh.capabilities is not None


def _answer(health: Health, *, is_well: bool = True) -> Response:
    return Response(orjson.dumps(health), status_code=200 if is_well else 503, media_type=JSON)
