"""What a job's owner is told over a webhook, and the signature by which it is known to come from here.

The headers are those of Standard Webhooks (standardwebhooks.com), which libraries of most languages check:
``webhook-id`` is the same when an event is told again, ``webhook-timestamp`` bounds how long one can be replayed, and
``webhook-signature`` is ``v1,`` and the base64 of HMAC-SHA256 over ``id.timestamp.body``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from pydantic import Field

from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.jobs import JobEventInfo, JobFailureInfo

_SECRET_PREFIX = "whsec_"


class HookData(ResponseBody):
    """The job, and what happened in it."""

    job_id: str
    kind: str
    state: str
    name: str | None = None
    client_id: str | None = None
    metadata: dict[str, str] = Field(default={})
    event: JobEventInfo
    result: dict[str, Any] | None = None
    failure: JobFailureInfo | None = None


class HookBody(ResponseBody):
    """The body of a webhook: ``type`` is ``job.`` and the new state, or ``job.attempt`` for an attempt that failed."""

    type: str
    timestamp: float
    """When it happened, in Unix seconds."""
    data: HookData


class HookSecretResponse(ResponseBody):
    """``GET jobs/webhook_secret``: what the signatures of a tenant's webhooks are checked with."""

    secret: str


def secret_text(key: bytes) -> str:
    """A signing key as libraries take it."""
    return _SECRET_PREFIX + base64.b64encode(key).decode()


def signed_headers(key: bytes, *, hook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers that a webhook goes out with."""
    signed = b".".join((hook_id.encode(), str(timestamp).encode(), body))
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": hook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }
