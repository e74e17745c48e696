"""``copy_weights``: a checkpoint under a new owner or in another project, without a byte moved."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from twinkle.core.adapter import Grant
from twinkle.core.errors import NotFound
from twinkle.server.openapi import described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key
from twinkle.server.state import Accounts, Artifacts, Common, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.server.tinker.grants import TOKEN_HEADER, grant_of
from twinkle.storage.checkpoints.checkpoints import NewCopy
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.checkpoints import CopyWeightsRequest, CopyWeightsResponse
from twinkle.wire.paths import ModelId, parse_checkpoint_path

_KEY_PREFIX = "copy:"

router = APIRouter()


@router.post(
    "/copy_weights",
    openapi_extra=described(
        CopyWeightsResponse, body=CopyWeightsRequest, refusals=[404], headers=[HEADER, TOKEN_HEADER]
    ),
)
async def copy_weights(
    request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """Copy a checkpoint that the caller may read. The same idempotency key, or number in a session: the same copy."""
    body = parse_body(CopyWeightsRequest, await common.bodies.read(request))
    source = str(parse_checkpoint_path(body.source_path, field="source_path"))
    token = request.headers.get(TOKEN_HEADER, body.weights_access_token)
    grant = await grant_of(common, artifacts, tenant, source, token, purpose="copy")
    if body.session_id is None:
        session_id = await _find_session(common, accounts, artifacts, tenant, body, grant, key=_key_of(request))
    else:
        session_id = (await common.sql.run(accounts.sessions.find, tenant, body.session_id)).id
    new = NewCopy(
        source=source,
        tenant=tenant,
        session=session_id,
        adapter=str(ModelId(session_id, body.model_seq_id or 0)),
        expires_at=None if body.ttl_seconds is None else common.clock.now() + body.ttl_seconds,
        grant=grant,
    )
    await accounts.resends.take_run_of_id(tenant, new.adapter)
    path = await common.sql.run(artifacts.checkpoints.copy, new)
    return answer(CopyWeightsResponse(tinker_path=path))


def _key_of(request: Request) -> str | None:
    key = idempotency_key(request)
    return f"{_KEY_PREFIX}{key}" if key else None


async def _find_session(
    common: Common,
    accounts: Accounts,
    artifacts: Artifacts,
    tenant: str,
    body: CopyWeightsRequest,
    grant: Grant | None,
    *,
    key: str | None,
) -> str:
    """The session of the copy, which has an end already. None is opened for a copy that cannot be made.

    Raises:
        NotFound: There is no such checkpoint for this tenant, nor was it copied under this key.
    """
    try:
        await common.sql.run(artifacts.checkpoints.find, body.source_path, tenant=tenant, grant=grant)
    except NotFound:
        made = await common.sql.run(accounts.sessions.opened_under, tenant, key)
        if made is None:
            raise
        return made
    new = NewSession(
        project_id=body.destination_project_id,
        display_name=f"copy of {body.source_path}",
        idempotency_key=key,
    )
    session_id = await accounts.resends.open_session(tenant, new)
    await common.sql.run(accounts.sessions.finish, tenant, session_id, reason="success", detail=None)
    return session_id
