"""What a path and a weights access token are worth: judged once, when a request is accepted, and stored with it."""

from __future__ import annotations

import orjson

from twinkle.core.adapter import Grant
from twinkle.server.state import Artifacts, Common
from twinkle.wire.bodies.training import LoadWeightsRequest

TOKEN_HEADER = "X-Tinker-Weights-Access-Token"


async def grant_of(
    common: Common, artifacts: Artifacts, tenant: str, path: str, token: str | None, *, purpose: str
) -> Grant | None:
    """What a token lets its bearer read; ``None`` without one, and for one that does not open this checkpoint."""
    if token is None:
        return None
    return await common.sql.run(artifacts.access_tokens.grant, token, path, reader=tenant, purpose=purpose)


def load_payload(body: LoadWeightsRequest, content: str | None = None, grant: Grant | None = None) -> bytes:
    """A load as the journal keeps it: with what its path meant and who allowed it, never with the token."""
    payload: dict[str, object] = {"path": body.path, "optimizer": body.optimizer}
    if content is not None:
        payload["content"] = content
    if grant is not None:
        payload["grant"] = grant.model_dump()
    return orjson.dumps(payload)
