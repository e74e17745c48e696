"""Bodies of our own routes for checkpoints that are pushed by themselves."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from twinkle.wire.bodies.base import Identifier, RequestBody, Text
from twinkle.wire.bodies.jobs_export import Secret
from twinkle.wire.bodies.twinkle import TwinkleBody


class PushRequest(RequestBody):
    """``POST twinkle/pushes``."""

    to: Text = Field(
        description="owner/name, with ms:// (the default) or hf:// before it, or an address that exports may have;"
        " {run} and {checkpoint} in it stand for what is pushed"
    )
    run_id: Identifier | None = Field(default=None, description="the run; default: all of the caller's")
    hub_token: Secret | None = Field(default=None, description="what opens the hub; kept sealed, never shown again")
    private: bool = True


class PushInfo(TwinkleBody):
    """What is wanted: where checkpoints go that are saved from ``created_at`` on."""

    push_id: str
    run_id: str | None = None
    to: str
    private: bool
    created_at: datetime
    last_job: str | None = None
    """The export that was submitted last; all are among the caller's jobs."""


class PushesResponse(TwinkleBody):
    """``GET twinkle/pushes``: the newest first."""

    pushes: list[PushInfo]
