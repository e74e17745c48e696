"""What came of a call whose client did not wait for it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle.server.errors import JSON
from twinkle.server.openapi import Access, Raw, described
from twinkle.server.state import Caller, Server
from twinkle.server.tinker.answers import answer
from twinkle.server.twinkle.calls import ACCEPTED, final_now, outcome_of, until_final
from twinkle.server.twinkle.sample_answers import later_samples
from twinkle.wire.bodies.twinkle_calls import PendingCall

router = APIRouter(prefix="/twinkle")


@router.get(
    "/futures/{request_id}",
    openapi_extra=described(
        Raw(JSON, "What the call itself would have answered."),
        others={202: PendingCall},
        refusals=[404, 410, 500],
        access=Access.TWINKLE,
    ),
)
async def show_future(
    request_id: str,
    request: Request,
    server: Server,
    tenant: Caller,
    wait_s: Annotated[float, Query(ge=0, le=600, allow_inf_nan=False)] = 0.0,
) -> Response:
    """The outcome of a call, as the call itself would have answered; 202 while it is under way."""
    lane = request_id.rpartition(":req:")[0]
    longest_s = min(wait_s, server.common.settings.long_poll_s)
    if await server.common.sql.run(partial(server.artifacts.named_adapters.has_lane, lane, tenant=tenant)):
        status = await final_now(server, tenant, request_id)
        if status is None and wait_s > 0:
            status = await until_final(request, server, tenant, request_id, timeout_s=longest_s)
        ended = None if status is None else await outcome_of(request, server, status)
    else:
        ended = await later_samples(request, server, tenant, request_id, wait_s=longest_s)
    if ended is not None:
        return ended
    pending = await server.queue.queue_board.pending(request_id, tenant)
    return answer(
        PendingCall(
            request_id=request_id, queue_state=pending.queue_state, queue_state_reason=pending.queue_state_reason
        ),
        status=ACCEPTED,
    )
