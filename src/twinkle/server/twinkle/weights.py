"""An adapter's weights as they are when they are asked for: behind everything that was accepted before.

They are saved for sampling without a name, by an operation in the adapter's own lane. Calls that come while the adapter
does nothing else share it.
"""

from __future__ import annotations

import hashlib

import orjson
from fastapi import Request

from twinkle.core.errors import TransientError, TwinkleError, UserError
from twinkle.core.operation import FailureCategory, FutureStatus, OperationKind, Payload, Unnumbered
from twinkle.server.openai.ordering import number_of
from twinkle.server.state import ServerState
from twinkle.server.tinker.answers import canonical_json
from twinkle.server.twinkle.calls import preferred_wait_s, until_final
from twinkle.storage.payloads import read_payload
from twinkle.wire.bodies.training import SaveWeightsForSamplerRequest

# No header can hold the first character, so no client's key is one of these.
_KEY = "\x1fweights:"
_TICKET_PATIENCE_S = 10.0
"""How long a call that prefers a ticket waits for the weights, if it does not say: it has no samples to name before."""


async def lane_of_weights(
    request: Request, server: ServerState, tenant: str, adapter: str, *, repeated_seq: int | None
) -> str:
    """The sampling session on the weights that an adapter has now, or had when a repeated request was first asked.

    Raises:
        UserError: The adapter is there no more, or its weights cannot be saved.
        TransientError: It takes too long.
        ClientDisconnect: Nobody waits for it any more.
    """
    weights = server.artifacts.sampling_sessions
    if repeated_seq is not None:
        before = await server.common.sql.run(weights.sampled_weights_before, adapter, seq=repeated_seq)
        if before is not None:
            return before
    max_seq, last_key = await server.common.sql.run(server.artifacts.named_adapters.last_request, adapter)
    if last_key is not None and last_key.startswith(_KEY):
        # Of one that failed, or whose result was kept for its time, nothing can be had: they are saved once more.
        status = await _saved(request, server, tenant, adapter, last_key)
        if status.failure is None and not status.expired:
            lane = await _lane_of(server, status)
            found = await server.common.sql.run(weights.find, lane, tenant=tenant)
            if found.weights is not None and found.weights.end_reason is None:
                return lane
    status = await _saved(request, server, tenant, adapter, f"{_KEY}{max_seq}")
    if status.failure is not None:
        kind = UserError if status.failure.category is FailureCategory.USER else TwinkleError
        raise kind(status.failure.message)
    return await _lane_of(server, status)


async def _saved(request: Request, server: ServerState, tenant: str, adapter: str, key: str) -> FutureStatus:
    """What became of the save under a key, which is asked for if it was not yet.

    Raises:
        UserError: The adapter takes no more.
        TransientError: It takes too long.
        ClientDisconnect: Nobody waits for it any more.
    """
    body = SaveWeightsForSamplerRequest(model_id=adapter, seq_id=1, sampling_session_seq_id=number_of(adapter, key))
    payload = canonical_json(body)
    accepted = await server.queue.submitter.submit(
        Unnumbered(
            tenant=tenant,
            lane=adapter,
            kind=OperationKind.SAVE_WEIGHTS_FOR_SAMPLER,
            digest=hashlib.sha256(payload).hexdigest(),
            payload=Payload(inline=payload),
            request_key=key,
            opens_sampler=True,
        )
    )
    # A wait of 0 is none that was asked for: the weights must be there before there is a ticket.
    wait_s = preferred_wait_s(request)
    timeout_s = None if wait_s is None else wait_s or _TICKET_PATIENCE_S
    status = await until_final(request, server, tenant, accepted.request_id, timeout_s=timeout_s)
    if status is None:
        raise TransientError(f"the weights of {adapter} are not there yet; send the request again in a moment")
    return status


async def _lane_of(server: ServerState, status: FutureStatus) -> str:
    """The sampling session that a save has opened."""
    assert status.result is not None, "what ended well has a result until its time is over"
    data = status.result.inline
    if data is None:
        data = await server.common.object_io.run(read_payload, server.artifacts.blobs, status.result)
    return str(orjson.loads(data)["sampling_session_id"])
