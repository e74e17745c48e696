"""What the routes share: answers as bytes, payloads in canonical form, times as the wire has them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from fastapi import Response

from twinkle.core.operation import Accepted
from twinkle.server.errors import JSON
from twinkle.wire.bodies.base import RequestBody, ResponseBody
from twinkle.wire.bodies.futures import FutureResponse

NO_CONTENT = 204


def answer(body: ResponseBody, *, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(body.to_json(), status_code=status, media_type=JSON)


def ticket(accepted: Accepted, *, model_id: str | None = None) -> Response:
    """The answer to every accepted operation: where its result will be."""
    return answer(FutureResponse(request_id=accepted.request_id, model_id=model_id))


def canonical_json(body: RequestBody) -> bytes:
    """A validated body as the journal keeps it: nothing unknown, no nulls, keys in order."""
    values = body.model_dump(mode="json", exclude_none=True)
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def moment(unix_s: float) -> datetime:
    """A point in time as the wire writes it."""
    return datetime.fromtimestamp(unix_s, UTC)
