"""Bodies of our own routes for weights access tokens."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Self

from pydantic import Field, model_validator

from twinkle.wire.bodies.base import Identifier, Name, PathText, RequestBody, ResponseBody, TtlSeconds

DEFAULT_TTL_S = 7 * 24 * 3600


class CreateAccessTokenRequest(RequestBody):
    """``POST access_tokens``: for one checkpoint, or for all of a run. ``name`` says whom it is for."""

    path: PathText | None = None
    run_id: Identifier | None = None
    name: Annotated[Name, Field(max_length=200)] = ""
    ttl_seconds: TtlSeconds = DEFAULT_TTL_S

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.path is None) == (self.run_id is None):
            raise ValueError("needs either path or run_id")
        return self


class AccessTokenInfo(ResponseBody):
    """A token as its owner sees it; without a ``path`` it opens every checkpoint of the run."""

    token_id: str
    run_id: str
    path: str | None = None
    name: str
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class NewAccessToken(AccessTokenInfo):
    """Answer to ``POST access_tokens``: the only one that holds the token itself."""

    token: str = Field(repr=False)


class AccessTokensResponse(ResponseBody):
    """``GET access_tokens``: those whose time is not over, the newest first."""

    tokens: list[AccessTokenInfo]
