"""Losses of the clients' own: traced by the SDK, judged here, run by the workers.

There is nothing to execute, so the future is complete at once. What is wrong with a graph becomes its failure: the
SDK tells its user then, as with any other operation.
"""

from __future__ import annotations

import hashlib

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput, UserError
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.server.openapi import described
from twinkle.server.state import Accounts, Common, Queue, Tenant
from twinkle.server.tinker.answers import canonical_json, ticket
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.futures import FutureResponse
from twinkle.wire.bodies.losses import CreateCustomLossRequest, CreateCustomLossResponse, peek_custom_loss
from twinkle.wire.digest import body_digest
from twinkle.wire.loss_graph import check_graph_size, read_loss_graph
from twinkle.wire.paths import CustomLossId

router = APIRouter()


@router.post(
    "/create_custom_loss", openapi_extra=described(FutureResponse, body=CreateCustomLossRequest, refusals=[404])
)
async def create_custom_loss(
    request: Request, common: Common, accounts: Accounts, queue: Queue, tenant: Tenant
) -> Response:
    """Define a loss for the ``forward_backward`` calls of a session. A resend gets the same one."""
    raw = await common.bodies.read(request)
    if not common.settings.custom_loss_server_side:
        raise InvalidInput(
            "custom_loss_server_side",
            "is off on this server, so clients run custom losses themselves: pass the function, or a handle without a"
            " loss_id, to forward_backward_custom",
        )
    loss_id, submission = _read(raw, tenant)
    await common.sql.run(accounts.sessions.find, tenant, loss_id.session_id)
    result = CreateCustomLossResponse(loss_id=str(loss_id)).to_json()
    return ticket(await common.sql.run(queue.journal.record_loss, submission, result=result))


def _read(raw: bytes, tenant: str) -> tuple[CustomLossId, Submission]:
    """Reads and judges a body; what is wrong with it becomes the rejection when its number is known.

    Raises:
        UserError: Not even the number could be read.
    """
    loss_id = peek_custom_loss(raw)
    payload, rejection = b"", None
    digest = hashlib.sha256(raw).hexdigest()
    try:
        check_graph_size(raw)
        body = parse_body(CreateCustomLossRequest, raw)
        read_loss_graph(body)
        digest, payload = body_digest(body), canonical_json(body)
    except UserError as error:
        if loss_id is None:
            raise
        rejection = error.message
    assert loss_id is not None, "a body that could be read has an address"
    submission = Submission(
        tenant=tenant,
        lane=loss_id.lane,
        seq=loss_id.custom_loss_seq_id,
        kind=OperationKind.CREATE_CUSTOM_LOSS,
        digest=digest,
        payload=Payload(inline=payload),
        rejection=rejection,
    )
    return loss_id, submission
