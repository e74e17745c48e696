"""Models asked as whoever uses the OpenAI-compatible routes asks them, under keys that follow from the plan."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from twinkle.core.job import JobFailed
from twinkle.jobs.context import JobContext

_BUSY = (429, 503)
_PATIENCE_S = 600.0
_SESSION = "X-Session-Id"


async def ask_model(
    context: JobContext[Any], path: str, body: Mapping[str, Any], *, key: tuple[object, ...]
) -> httpx.Response:
    """An answer, which may be a refusal; the same one whenever it is asked for under the same key.

    It is drawn in the job's own session, behind the tenant's interactive work and for as long as the job lasts.

    Raises:
        JobFailed: Transient: the server was busy for ten minutes, or failed.
    """
    headers = {
        "Idempotency-Key": ":".join(str(part) for part in (context.job.id, *key)),
        _SESSION: await context.door.session(),
    }
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + _PATIENCE_S
    while True:
        answer = await context.door.request("POST", path, json=dict(body), headers=headers)
        is_over = loop.time() > ends_at
        if answer.status_code not in _BUSY or is_over:
            break
        await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))
    if answer.status_code in _BUSY or answer.status_code >= 500:
        raise JobFailed("model_busy", f"{body.get('model')} did not answer: {answer.text}", is_transient=True)
    return answer
