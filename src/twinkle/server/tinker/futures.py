"""The long polls: ``retrieve_future`` for one operation's outcome, ``retrieve_futures`` for the samples of a client."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import Expired, NotFound, Overloaded, StorageUnavailable
from twinkle.core.operation import FutureStatus, OperationKind, Payload
from twinkle.server.answering.results import answer_in_parts, result_response
from twinkle.server.errors import JSON
from twinkle.server.openapi import PROTOBUF, Raw, described
from twinkle.server.state import Artifacts, Common, Queue, Tenant
from twinkle.server.tinker.answers import NO_CONTENT, answer
from twinkle.storage.payloads import read_payload
from twinkle.storage.sampling.sampling_sessions import EndedSample
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.futures import (
    CancelFutureRequest,
    FailedCompletion,
    FailedResponse,
    FinishedCompletion,
    MetadataResponse,
    PendingResponse,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
)
from twinkle.wire.bodies.runs import BranchResponse
from twinkle.wire.bodies.training import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from twinkle.wire.json_results import ForwardBackwardOutput, SampleResponse, pass_in_json, sample_in_json

_NOT_READY = 408
# A client asks again at once after a 408.
_STORAGE_PAUSE_S = 1.0
_STORAGE_AWAY = "the server's storage does not answer right now; accepted operations are kept"

# What results look like in JSON, and what stands for one.
Outcome: TypeAlias = (
    CreateModelResponse
    | OptimStepResponse
    | SaveWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | LoadWeightsResponse
    | BranchResponse
    | UnloadModelResponse
    | FailedResponse
    | MetadataResponse
    | ForwardBackwardOutput
    | SampleResponse
)

router = APIRouter()


@router.post(
    "/retrieve_future",
    openapi_extra=described(
        Outcome,
        Raw(
            PROTOBUF,
            "The latter two as in twinkle/wire/schema.proto, but for those who accept JSON alone.",
        ),
        body=RetrieveFutureRequest,
        others={408: PendingResponse},
        refusals=[404, 410],
        headers=["X-Tinker-Request-Type"],
    ),
)
async def retrieve_future(
    request: Request, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """The outcome when it is there, else 408 after the poll's time. Outcomes can be read again and again."""
    body = parse_body(RetrieveFutureRequest, await common.bodies.read(request))
    try:
        owned = await queue.futures.wait(body.request_id, tenant, common.settings.long_poll_s)
        if not owned.status.state.is_final:
            return answer(await queue.queue_board.pending(body.request_id, tenant), status=_NOT_READY)
        return await _outcome(request, common, artifacts, owned.status, allow_metadata_only=body.allow_metadata_only)
    except NotFound:
        # The SDK submits a sample again after a 410 and gives up on everything else after a 404.
        if request.headers.get("x-tinker-request-type") == "Sample":
            raise Expired(f"no future {body.request_id!r}") from None
        raise
    except StorageUnavailable:
        await asyncio.sleep(_STORAGE_PAUSE_S)
        away = PendingResponse(queue_state="paused_capacity", queue_state_reason=_STORAGE_AWAY)
        return answer(away, status=_NOT_READY)


@router.post(
    "/retrieve_futures",
    openapi_extra=described(RetrieveFuturesResponse, body=RetrieveFuturesRequest, refusals=[404]),
)
async def retrieve_futures(
    request: Request, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """What of a sampling client's samples ended after the cursor; waits until there is something. Outcomes are kept."""
    body = parse_body(RetrieveFuturesRequest, await common.bodies.read(request))
    lane = body.target.sampling_session_id
    await common.sql.run(artifacts.sampling_sessions.find, lane, tenant=tenant)
    longest_s = common.settings.long_poll_s
    ended = await queue.lane_polls.wait(
        lane,
        client=body.target.cloned_sampler_id,
        after=body.prev_cursor,
        timeout_s=longest_s if body.timeout is None else min(body.timeout, longest_s),
    )
    cursor = ended[-1].ended_no if ended else body.prev_cursor
    return answer(RetrieveFuturesResponse(completions=[_completion(sample) for sample in ended], cursor=cursor))


@router.post("/cancel_future", openapi_extra=described(None, body=CancelFutureRequest, refusals=[404]))
async def cancel_future(
    request: Request, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """End a sample nobody wants any more. One that has ended keeps its outcome."""
    body = parse_body(CancelFutureRequest, await common.bodies.read(request))
    if await common.sql.run(artifacts.sampling_sessions.cancel, body.request_id, tenant):
        queue.futures.notify([body.request_id])
        queue.lane_polls.notify([body.request_id])
    return Response(status_code=NO_CONTENT)


def _completion(sample: EndedSample) -> FinishedCompletion | FailedCompletion:
    if sample.failed:
        return FailedCompletion(request_id=sample.request_id)
    return FinishedCompletion(request_id=sample.request_id, response_payload_uncompressed_size=sample.result_bytes)


async def _outcome(
    request: Request, common: Common, artifacts: Artifacts, status: FutureStatus, *, allow_metadata_only: bool
) -> Response:
    if status.expired:
        raise Expired(status.why_expired(common.settings.result_ttl_s))
    if status.failure is not None:
        return answer(FailedResponse(error=status.failure.message, category=status.failure.category.value))
    assert status.result is not None, "a final future has a result or a failure"
    if allow_metadata_only and status.result.inline is None and status.result.size_bytes:
        # Large: the client makes room for so many bytes, then asks for them.
        return answer(MetadataResponse(response_payload_size=status.result.size_bytes))
    if status.kind.answers_protobuf and _reads_json_alone(request):
        return await _in_json(request, common, artifacts, status.kind, status.result)
    common.results.hold_streamed(request, status.result.size_bytes)
    media_type = PROTOBUF if status.kind.answers_protobuf else JSON
    return await result_response(common.object_io, artifacts.blobs, status.result, media_type=media_type)


def _reads_json_alone(request: Request) -> bool:
    """Whether a client is an SDK before 0.22: newer ones name protobuf where it may come, and others name nothing."""
    accepted = {one.partition(";")[0].strip().lower() for one in request.headers.get("accept", "").split(",")}
    return accepted == {JSON}


async def _in_json(
    request: Request, common: Common, artifacts: Artifacts, kind: OperationKind, result: Payload
) -> Response:
    """A result written anew, when there is room for that; until then the client asks again."""
    try:
        hold = await common.results.hold_whole(request, result.size_bytes, patience_s=common.settings.long_poll_s)
    except Overloaded as error:
        # These SDKs give an operation up after a 429.
        return answer(PendingResponse(queue_state="paused_capacity", queue_state_reason=str(error)), status=_NOT_READY)
    write = sample_in_json if kind is OperationKind.SAMPLE else pass_in_json
    if result.inline is not None:
        return Response(b"".join(write(result.inline).pieces), media_type=JSON)
    raw = await common.object_io.run(read_payload, artifacts.blobs, result)
    written = await common.object_io.run(write, raw)
    hold.write_in_parts(result.size_bytes, written.largest_bytes)
    return await answer_in_parts(common.object_io, written.pieces, result_bytes=result.size_bytes)
