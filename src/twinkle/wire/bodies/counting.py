"""Bodies of what requests for samples would take: their prompts in tokens, and how many may be drawn."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from twinkle.wire.bodies.base import RequestBody, ResponseBody

MAX_COUNTED = 256


class CountRequest(RequestBody):
    """``POST count_tokens``: requests as a route would take them."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    requests: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_COUNTED)


class Counted(ResponseBody):
    """What one request would take; or why its route would refuse it."""

    base_model: str | None = None
    prompt_tokens: int = 0
    num_samples: int = 0
    max_sampled_tokens: int = 0
    """Of all samples together, if none ended by itself."""
    refusal: str | None = None


class CountResponse(ResponseBody):
    """In the order of the requests."""

    counts: list[Counted]
