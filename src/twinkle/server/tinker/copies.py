"""``copy_weights``: a checkpoint under a new owner or in another project, without a byte moved."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import NotFound
from twinkle.server.openapi import described
from twinkle.server.state import Server, ServerState, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.server.tinker.sessions import MAX_IDEMPOTENCY_KEY_LENGTH
from twinkle.storage.copies import NewCopy
from twinkle.storage.directory import NewSession
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.checkpoints import CopyWeightsRequest, CopyWeightsResponse
from twinkle.wire.paths import ModelId, parse_checkpoint_path

_TOKEN_HEADER = "x-tinker-weights-access-token"
_KEY_PREFIX = "copy:"

router = APIRouter()


@router.post(
    "/copy_weights",
    openapi_extra=described(
        CopyWeightsResponse, body=CopyWeightsRequest, refusals=[404], headers=["X-Idempotency-Key"]
    ),
)
async def copy_weights(request: Request, server: Server, tenant: Tenant) -> Response:
    """Copy a checkpoint that the caller may read. The same idempotency key, or number in a session: the same copy."""
    body = parse_body(CopyWeightsRequest, await server.bodies.read(request))
    source = str(parse_checkpoint_path(body.source_path, field="source_path"))
    if body.session_id is None:
        await _check_readable(server, tenant, source, has_token=_TOKEN_HEADER in request.headers)
        session_id = await _open_session(server, tenant, body, request.headers.get("x-idempotency-key"))
    else:
        session_id = (await server.sql.run(server.directory.session, tenant, body.session_id)).id
    new = NewCopy(
        source=source,
        tenant=tenant,
        session=session_id,
        adapter=str(ModelId(session_id, body.model_seq_id or 0)),
        expires_at=None if body.ttl_seconds is None else server.clock.now() + body.ttl_seconds,
    )
    path = await server.sql.run(server.copies.copy, new)
    await server.sql.run(server.audit.note, tenant, "checkpoint_copy", tinker_path=path, source=source)
    return answer(CopyWeightsResponse(tinker_path=path))


async def _check_readable(server: ServerState, tenant: str, source: str, *, has_token: bool) -> None:
    """No session is opened for a copy that cannot be made."""
    try:
        await server.sql.run(server.catalog.checkpoint, source, tenant=tenant)
    except NotFound as error:
        if has_token:
            raise NotFound(f"{error.message}; weights access tokens are not offered here: have it published") from None
        raise


async def _open_session(server: ServerState, tenant: str, body: CopyWeightsRequest, key: str | None) -> str:
    new = NewSession(
        tags=[],
        user_metadata=None,
        project_id=body.destination_project_id,
        display_name=f"copy of {body.source_path}",
        sdk_version="",
        idempotency_key=f"{_KEY_PREFIX}{key}"[:MAX_IDEMPOTENCY_KEY_LENGTH] if key else None,
    )
    session_id = await server.sql.run(server.directory.open_session, tenant, new)
    await server.sql.run(server.directory.finish_session, tenant, session_id, reason="success", detail=None)
    return session_id
