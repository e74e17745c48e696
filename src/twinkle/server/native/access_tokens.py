"""Tokens with which others read an owner's checkpoints: issued, listed and revoked by the owner."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle.server.openapi import described
from twinkle.server.state import Artifacts, Common, Tenant
from twinkle.server.tinker.answers import answer, moment
from twinkle.storage.checkpoints.access_tokens import AccessToken
from twinkle.wire.bodies.access_tokens import (
    AccessTokenInfo,
    AccessTokensResponse,
    CreateAccessTokenRequest,
    NewAccessToken,
)
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.paths import parse_checkpoint_path

router = APIRouter(prefix="/access_tokens")


@router.post("", openapi_extra=described(NewAccessToken, body=CreateAccessTokenRequest, refusals=[404]))
async def create_access_token(request: Request, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """A new token, shown this once."""
    body = parse_body(CreateAccessTokenRequest, await common.bodies.read(request))
    if body.run_id is not None:
        issue = partial(artifacts.access_tokens.issue_for_run, body.run_id)
    else:
        assert body.path is not None, "the body names one of the two"
        issue = partial(artifacts.access_tokens.issue_for_checkpoint, str(parse_checkpoint_path(body.path)))
    issued = await common.sql.run(issue, tenant=tenant, name=body.name, ttl_s=body.ttl_seconds)
    return answer(NewAccessToken(token=issued.secret, **_describe(issued.token).model_dump()))


@router.get("", openapi_extra=described(AccessTokensResponse))
async def list_access_tokens(
    common: Common, artifacts: Artifacts, tenant: Tenant, run_id: Annotated[str | None, Query(max_length=512)] = None
) -> Response:
    """The caller's tokens, of one run or of all, without themselves."""
    tokens = await common.sql.run(artifacts.access_tokens.all, tenant=tenant, run=run_id)
    return answer(AccessTokensResponse(tokens=[_describe(token) for token in tokens]))


@router.delete("/{token_id}", openapi_extra=described(AccessTokenInfo, refusals=[404]))
async def revoke_access_token(token_id: str, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """Let a token open nothing any more. Twice is harmless."""
    return answer(_describe(await common.sql.run(artifacts.access_tokens.revoke, token_id, tenant=tenant)))


def _describe(token: AccessToken) -> AccessTokenInfo:
    return AccessTokenInfo(
        token_id=token.id,
        run_id=token.run,
        path=token.path,
        name=token.name,
        created_at=moment(token.created_at),
        expires_at=moment(token.expires_at),
        revoked_at=None if token.revoked_at is None else moment(token.revoked_at),
        last_used_at=None if token.last_used_at is None else moment(token.last_used_at),
    )
