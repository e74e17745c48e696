"""The gateway of the Twinkle dialect: presence, health, capacity. Sessions are those of the Tinker dialect."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import Expired, NotFound
from twinkle.server.health import Health, healthz
from twinkle.server.openapi import Access, described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key, priority_of
from twinkle.server.state import Accounts, Caller, Common, Queue
from twinkle.server.tinker.answers import answer
from twinkle.server.tinker.service import served_models
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.twinkle import (
    CapacityResponse,
    CleanupStatus,
    DeepHealthResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    ModelHealth,
    OpenSessionRequest,
    OpenSessionResponse,
    ResourceCounts,
    ServedModelsResponse,
    StatusResponse,
)

_UNAVAILABLE: Final = 503
# Housekeeping comes round every few minutes; what is so long over its time, nobody clears away.
_OVERDUE_S = 3600.0
_SDK = "twinkle"

router = APIRouter(prefix="/twinkle")


@router.get("/healthz", openapi_extra=described(Health, access=Access.NONE))
async def twinkle_healthz() -> Response:
    """The process answers; no key is asked for."""
    return await healthz()


@router.get(
    "/healthz/deep",
    openapi_extra=described(DeepHealthResponse, others={_UNAVAILABLE: DeepHealthResponse}, access=Access.NONE),
)
async def twinkle_healthz_deep(queue: Queue) -> Response:
    """Of each base model whether a worker serves it just now; 503 unless all are served, and there is one."""
    alive: dict[str, bool] = {}
    for mesh in await queue.meshes.all():
        if mesh.capabilities is not None:
            name = mesh.capabilities.base_model
            alive[name] = alive.get(name, False) or mesh.alive
    models = {
        name: ModelHealth(healthy=is_well, status_code=200 if is_well else _UNAVAILABLE)
        for name, is_well in alive.items()
    }
    is_well = bool(alive) and all(alive.values())
    return answer(DeepHealthResponse(healthy=is_well, models=models), status=200 if is_well else _UNAVAILABLE)


@router.get("/capacity_info", openapi_extra=described(CapacityResponse, access=Access.TWINKLE))
async def capacity_info(queue: Queue, _: Caller) -> Response:
    """How many adapters lie ready on devices, everybody's together. One more is taken anyway: another is parked."""
    live = [mesh for mesh in await queue.meshes.all() if mesh.alive and mesh.capabilities is not None]
    slots = sum(mesh.capabilities.adapter_slots for mesh in live if mesh.capabilities is not None)
    used = min(sum(mesh.num_live for mesh in live), slots)
    return answer(CapacityResponse(max_loras=slots, used_loras=used, free_loras=slots - used))


@router.get("/get_server_capabilities", openapi_extra=described(ServedModelsResponse, access=Access.TWINKLE))
async def twinkle_server_capabilities(queue: Queue, _: Caller) -> Response:
    """The base models of all meshes, whether their workers live just now or not."""
    return answer(ServedModelsResponse(supported_models=served_models(await queue.meshes.all())))


@router.post(
    "/create_session",
    openapi_extra=described(OpenSessionResponse, body=OpenSessionRequest, headers=[HEADER], access=Access.TWINKLE),
)
async def open_session(request: Request, common: Common, accounts: Accounts, tenant: Caller) -> Response:
    """A new session; the same idempotency key gets the same one."""
    body = parse_body(OpenSessionRequest, await common.bodies.read(request))
    priority_of(body.metadata)
    new = NewSession(user_metadata=body.metadata, sdk_version=_SDK, idempotency_key=idempotency_key(request))
    return answer(OpenSessionResponse(session_id=await accounts.resends.open_session(tenant, new)))


@router.post(
    "/session_heartbeat",
    openapi_extra=described(HeartbeatResponse, body=HeartbeatRequest, refusals=[404, 410], access=Access.TWINKLE),
)
async def hear_session(request: Request, common: Common, accounts: Accounts, tenant: Caller) -> Response:
    """A sign of life; 410 says that the session was finished."""
    body = parse_body(HeartbeatRequest, await common.bodies.read(request))
    try:
        is_open = await common.sql.run(accounts.sessions.heartbeat, tenant, body.session_id)
    except NotFound:
        raise NotFound("Unknown session") from None
    if not is_open:
        raise Expired(f"session {body.session_id} was finished")
    return answer(HeartbeatResponse())


@router.get("/status", openapi_extra=described(StatusResponse, access=Access.TWINKLE))
async def status(common: Common, accounts: Accounts, tenant: Caller) -> Response:
    """What the caller has here, and whether what has had its time is cleared away."""
    present = await common.sql.run(accounts.accounting.present, tenant, silent_s=common.settings.session_timeout_s)
    kept_s = common.settings.result_ttl_s
    is_late = await common.sql.run(accounts.accounting.is_cleanup_late, kept_s=kept_s, late_s=_OVERDUE_S)
    return answer(
        StatusResponse(
            resources=ResourceCounts(
                sessions=present.num_sessions,
                models=present.num_adapters,
                sampling_sessions=present.num_sampling_sessions,
                futures=present.num_open,
            ),
            cleanup=CleanupStatus(running=not is_late, expiration_timeout=kept_s),
        )
    )
