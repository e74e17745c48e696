"""Bodies of the Twinkle dialect's calls: the adapter they are about, tickets, and answers that are not a result's."""

from __future__ import annotations

from typing import Literal

from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.futures import QueueState


class CallTicket(ResponseBody):
    """A call was accepted and is under way; sent with status 202."""

    request_id: str


class PendingCall(ResponseBody):
    """A call is still under way; sent with status 202."""

    request_id: str
    queue_state: QueueState
    queue_state_reason: str | None = None


class AdapterCreated(ResponseBody):
    """An adapter was made."""

    status: Literal["ok"] = "ok"
    adapter_name: str
    training_run_id: str
    warnings: list[str] | None = None
