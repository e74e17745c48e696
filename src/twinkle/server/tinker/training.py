"""The numbered operations of an adapter.

A number is used up as soon as the client has sent it. So what is wrong with a body whose number can be read becomes
the reason of a future that fails in its turn; a 4xx would leave a hole that the adapter's later operations wait for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from twinkle.core.batch_loss import BATCH_LOSSES
from twinkle.core.errors import InvalidInput, NotFound, TooLarge, UserError
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.core.operation_limits import OperationLimits
from twinkle.core.pictures import PictureLimits, PictureRules
from twinkle.server.admission.offers import capabilities_of_run, why_no_embeddings, why_no_own_samples
from twinkle.server.errors import JSON
from twinkle.server.openapi import PROTOBUF, Raw, described
from twinkle.server.receiving.body import Body
from twinkle.server.state import Accounts, Artifacts, Common, Queue, Server, Tenant
from twinkle.server.tinker.answers import canonical_json, ticket
from twinkle.server.tinker.grants import grant_of, load_payload
from twinkle.server.tinker.models import create_from_checkpoint
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.futures import FutureResponse
from twinkle.wire.bodies.training import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    peek_operation,
)
from twinkle.wire.digest import EPHEMERAL_SAVE_IGNORES, body_digest
from twinkle.wire.json_passes import ForwardBackwardRequest, ForwardRequest, peek_json_pass, read_json_pass
from twinkle.wire.meant_loss import judge_loss
from twinkle.wire.paths import parse_checkpoint_path, validate_new_name
from twinkle.wire.training import (
    EnvelopeKey,
    ForwardBackwardEnvelope,
    canonical_digest,
    judge_pictures,
    parse_envelope,
    peek_envelope,
)

_BYTES_PER_TOKEN = 4
_PASSES = Raw(PROTOBUF, "A ForwardBackwardRequest of twinkle/wire/schema.proto; zstd is understood.")

BodyT = TypeVar(
    "BodyT",
    bound=OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
    | LoadWeightsRequest,
)

router = APIRouter()


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """A numbered operation as far as it could be read."""

    key: EnvelopeKey
    kind: OperationKind
    digest: str
    payload: bytes = b""
    num_tokens: int = 0
    rejection: str | None = None
    has_pictures: bool = False
    embeds: str = ""
    """A loss that compares embeddings, by its name."""
    opens_sampler: bool = False


@router.post(
    "/forward_backward",
    openapi_extra=described(FutureResponse, body=_PASSES, also_body=ForwardBackwardRequest, refusals=[404]),
)
async def forward_backward(
    request: Request, common: Common, accounts: Accounts, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """A batch of datums, forward only or, as always in JSON, with gradients. The tensors are the worker's to judge."""
    async with common.bodies.receive(request) as body:
        read: Callable[[Body], Numbered] = _read_protobuf
        if _is_json(request):
            limit_bytes = common.settings.max_body_bytes
            read = partial(_read_json_pass, body_class=ForwardBackwardRequest, limit_bytes=limit_bytes)
        return await _accept_pass(common, queue, artifacts, tenant, body, read)


@router.post("/forward", openapi_extra=described(FutureResponse, body=ForwardRequest, refusals=[404]))
async def forward(request: Request, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant) -> Response:
    """A batch of datums, forward only, as SDKs before 0.22 ask for it."""
    async with common.bodies.receive(request) as body:
        limit_bytes = common.settings.max_body_bytes
        read = partial(_read_json_pass, body_class=ForwardRequest, limit_bytes=limit_bytes)
        return await _accept_pass(common, queue, artifacts, tenant, body, read)


@router.post("/optim_step", openapi_extra=described(FutureResponse, body=OptimStepRequest, refusals=[404]))
async def optim_step(request: Request, common: Common, queue: Queue, tenant: Tenant) -> Response:
    """Apply the accumulated gradients."""
    raw = await common.bodies.read(request)
    return await _accept(queue, tenant, _read_json(raw, OptimStepRequest, OperationKind.OPTIM_STEP, _judge_optimizer))


@router.post("/save_weights", openapi_extra=described(FutureResponse, body=SaveWeightsRequest, refusals=[404]))
async def save_weights(request: Request, common: Common, queue: Queue, tenant: Tenant) -> Response:
    """Write a training checkpoint."""
    raw = await common.bodies.read(request)
    return await _accept(queue, tenant, _read_json(raw, SaveWeightsRequest, OperationKind.SAVE_WEIGHTS, _judge_name))


@router.post(
    "/save_weights_for_sampler",
    openapi_extra=described(FutureResponse, body=SaveWeightsForSamplerRequest, refusals=[404]),
)
async def save_weights_for_sampler(
    request: Request, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """Write weights for sampling: named, or behind a sampling session."""
    raw = await common.bodies.read(request)
    kind = OperationKind.SAVE_WEIGHTS_FOR_SAMPLER
    operation = _read_json(raw, SaveWeightsForSamplerRequest, kind, _judge_name)
    if operation.rejection is None and parse_body(SaveWeightsForSamplerRequest, raw).path is None:
        capabilities = await capabilities_of_run(common, artifacts, queue, tenant, operation.key.model_id)
        rejection = why_no_own_samples(capabilities)
        operation = replace(_rejected(operation, rejection), opens_sampler=rejection is None)
    return await _accept(queue, tenant, operation)


@router.post(
    "/save_weights_external",
    openapi_extra=described(FutureResponse, body=SaveWeightsExternalRequest, refusals=[404]),
)
async def save_weights_external(request: Request, common: Common, queue: Queue, tenant: Tenant) -> Response:
    """Write weights as PEFT files for download."""
    raw = await common.bodies.read(request)
    kind = OperationKind.SAVE_WEIGHTS_EXTERNAL
    return await _accept(queue, tenant, _read_json(raw, SaveWeightsExternalRequest, kind, _judge_name))


@router.post("/load_weights", openapi_extra=described(FutureResponse, body=LoadWeightsRequest, refusals=[404]))
async def load_weights(request: Request, server: Server, tenant: Tenant) -> Response:
    """Load a checkpoint into an adapter, or make a new adapter of it."""
    raw = await server.common.bodies.read(request)
    if peek_operation(raw) is None:
        body = parse_body(LoadWeightsRequest, raw)
        if body.creates_model:
            return await create_from_checkpoint(server, tenant, body)
    operation = _read_json(raw, LoadWeightsRequest, OperationKind.LOAD_WEIGHTS, _judge_path, write=load_payload)
    if operation.rejection is None:
        body = parse_body(LoadWeightsRequest, raw)
        content = await _bound_load(server.common, server.artifacts, tenant, body, operation.key.model_id)
        operation = replace(operation, payload=content)
    return await _accept(server.queue, tenant, operation)


async def _bound_load(
    common: Common, artifacts: Artifacts, tenant: str, body: LoadWeightsRequest, adapter: str
) -> bytes:
    """A load with the content that its path means now.

    A run's own checkpoints are found when it is the load's turn: whatever was submitted before it is saved by then.
    """
    if parse_checkpoint_path(body.path).run_id == adapter:
        return load_payload(body)
    grant = await grant_of(common, artifacts, tenant, body.path, body.weights_access_token, purpose="load")
    try:
        checkpoint = await common.sql.run(artifacts.checkpoints.find, body.path, tenant=tenant, grant=grant)
    except NotFound:
        # It has used up its number: it fails in its turn.
        return load_payload(body)
    return load_payload(body, checkpoint.content, grant)


async def _accept_pass(
    common: Common, queue: Queue, artifacts: Artifacts, tenant: str, body: Body, read: Callable[[Body], Numbered]
) -> Response:
    if len(body.data) <= common.settings.inline_payload_bytes:
        operation = read(body)
    else:
        operation = await common.object_io.run(read, body)
    if operation.has_pictures or operation.embeds:
        capabilities = await capabilities_of_run(common, artifacts, queue, tenant, operation.key.model_id)
        if operation.embeds:
            operation = _rejected(operation, why_no_embeddings(capabilities, operation.embeds))
        elif capabilities is not None:
            limits = common.settings.picture_limits
            operation = await common.object_io.run(_with_pictures, operation, capabilities.pictures, limits)
    return await _accept(queue, tenant, _of_allowed_size(operation, common.settings.operation_limits))


async def _accept(queue: Queue, tenant: str, operation: Numbered) -> Response:
    submission = Submission(
        tenant=tenant,
        lane=operation.key.model_id,
        seq=operation.key.seq_id,
        kind=operation.kind,
        digest=operation.digest,
        payload=Payload(inline=operation.payload),
        num_tokens=operation.num_tokens,
        rejection=operation.rejection,
        opens_sampler=operation.opens_sampler,
    )
    return ticket(await queue.submitter.submit(submission), model_id=operation.key.model_id)


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == JSON


def _read_json_pass(
    body: Body, *, body_class: type[ForwardBackwardRequest] | type[ForwardRequest], limit_bytes: int
) -> Numbered:
    """Reads a pass in JSON as the protobuf body that it stands for.

    Raises:
        UserError: Not even the address could be read.
    """
    raw = body.complete()
    try:
        written = read_json_pass(body_class, raw)
        if len(written) > limit_bytes:
            raise TooLarge(f"the request takes {len(written)} bytes, more than {limit_bytes}; send smaller chunks")
    except UserError as error:
        key = peek_json_pass(raw)
        if key is None:
            raise
        kind = OperationKind.FORWARD if body_class is ForwardRequest else OperationKind.FORWARD_BACKWARD
        return Numbered(key=key, kind=kind, digest=hashlib.sha256(raw).hexdigest(), rejection=error.message)
    return _read_protobuf(Body(written))


def _read_protobuf(body: Body) -> Numbered:
    """Reads the address, the size and the fingerprint.

    Raises:
        UserError: Not even the address could be read.
    """
    refusal = body.refusal
    if refusal is None:
        try:
            envelope = parse_envelope(body.data)
            judge_loss(envelope.message)
            return _numbered(envelope, body.data)
        except InvalidInput as error:
            refusal = error
    key = peek_envelope(body.data)
    if key is None:
        raise refusal
    digest = body.refused_digest or hashlib.sha256(body.data).hexdigest()
    return Numbered(key=key, kind=OperationKind.FORWARD_BACKWARD, digest=digest, rejection=refusal.message)


def _numbered(envelope: ForwardBackwardEnvelope, raw: bytes) -> Numbered:
    loss = envelope.message.loss_fn
    return Numbered(
        key=EnvelopeKey(envelope.model_id, envelope.seq_id),
        kind=OperationKind.FORWARD if envelope.forward_only else OperationKind.FORWARD_BACKWARD,
        digest=canonical_digest(envelope.message),
        payload=raw,
        num_tokens=_count_tokens(envelope),
        has_pictures=envelope.has_pictures,
        embeds=loss if (rules := BATCH_LOSSES.get(loss)) is not None and rules.embeds else "",
    )


def _rejected(operation: Numbered, reason: str | None) -> Numbered:
    """The operation, which uses up its number and does nothing, if there is a reason."""
    return operation if reason is None else replace(operation, payload=b"", num_tokens=0, rejection=reason)


def _of_allowed_size(operation: Numbered, limits: OperationLimits) -> Numbered:
    """The operation, rejected if it is too large."""
    if operation.rejection is not None:
        return operation
    try:
        limits.check_pass(operation.num_tokens)
    except InvalidInput as error:
        return replace(operation, payload=b"", num_tokens=0, rejection=error.message)
    return operation


def _with_pictures(operation: Numbered, rules: PictureRules | None, limits: PictureLimits) -> Numbered:
    """The operation with the tokens of its pictures counted, or rejected for one of them."""
    try:
        num_tokens = judge_pictures(parse_envelope(operation.payload), rules, limits)
    except InvalidInput as error:
        return replace(operation, payload=b"", rejection=error.message)
    return replace(operation, num_tokens=operation.num_tokens + num_tokens)


def _count_tokens(envelope: ForwardBackwardEnvelope) -> int:
    num_bytes = sum(len(chunk.encoded_text.tokens) for datum in envelope.message.data for chunk in datum.model_input)
    return num_bytes // _BYTES_PER_TOKEN


def _read_json(
    raw: bytes,
    body_class: type[BodyT],
    kind: OperationKind,
    judge: Callable[[BodyT], None],
    *,
    write: Callable[[BodyT], bytes] = canonical_json,
) -> Numbered:
    """Reads a body and writes what is kept of it; what is wrong with it becomes the rejection when the number is known.

    Raises:
        UserError: Not even the number could be read.
    """
    try:
        body = parse_body(body_class, raw)
        judge(body)
    except UserError as error:
        key = peek_operation(raw)
        if key is None:
            raise
        return Numbered(key=key, kind=kind, digest=hashlib.sha256(raw).hexdigest(), rejection=error.message)
    assert body.model_id is not None and body.seq_id is not None, "a body that could be read has an address"
    digest = body_digest(body, ignore=EPHEMERAL_SAVE_IGNORES)
    return Numbered(key=EnvelopeKey(body.model_id, body.seq_id), kind=kind, digest=digest, payload=write(body))


def _judge_optimizer(body: OptimStepRequest) -> None:
    if body.optimizer_params is not None:
        kind = body.optimizer_params.type
        raise InvalidInput("optimizer_params.type", f"{kind!r} is not offered here; send adam_params")


def _judge_name(body: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest) -> None:
    if body.path is not None:
        validate_new_name(body.path)


def _judge_path(body: LoadWeightsRequest) -> None:
    parse_checkpoint_path(body.path)
