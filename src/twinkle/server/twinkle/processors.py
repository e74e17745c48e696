"""Data sets, loaders and their like of the Twinkle dialect: each a lane whose calls are operations."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput, NotFound, TooLarge
from twinkle.core.ids import new_id
from twinkle.core.operation import OperationKind, Payload, Submission, Unnumbered
from twinkle.core.processors import (
    CREATE,
    PROCESSOR_PREFIX,
    REFERENCES,
    accepted_arguments,
    is_processor_id,
    method_of,
    offer_of,
)
from twinkle.server.openapi import Access, described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key
from twinkle.server.state import Caller, Server, ServerState
from twinkle.server.tinker.answers import answer
from twinkle.server.twinkle.calls import answer_accepted, answer_call
from twinkle.server.twinkle.sessions import session_of
from twinkle.storage.processors.processors import NewProcessor, Processor, ProcessorLimit
from twinkle.wire.bodies.base import RequestBody, parse_body
from twinkle.wire.bodies.twinkle_calls import CallTicket
from twinkle.wire.bodies.twinkle_processors import (
    CallProcessorRequest,
    CallProcessorResponse,
    CreateProcessorRequest,
    CreateProcessorResponse,
)
from twinkle.wire.calls import Call, encode_call
from twinkle.wire.dataset_meta import FIELD, read_dataset_meta

_LARGE_BYTES = 2**18

BodyT = TypeVar("BodyT", bound=RequestBody)

router = APIRouter(prefix="/processor/twinkle")


@router.post(
    "/create",
    openapi_extra=described(
        CreateProcessorResponse,
        body=CreateProcessorRequest,
        headers=[HEADER],
        others={202: CallTicket},
        refusals=[404],
        access=Access.TWINKLE,
    ),
)
async def create_processor(request: Request, server: Server, tenant: Caller) -> Response:
    """A new processor of one of our classes; the same idempotency key gets the same one."""
    _check_served(server)
    async with server.common.bodies.receive(request) as incoming:
        body = await _parsed(server, CreateProcessorRequest, incoming.complete())
    offer = offer_of(body.processor_type, body.class_type)
    arguments = accepted_arguments(body.model_extra or {}, offer.takes)
    await _check_named(arguments, server, tenant)
    call = await _encoded(server, Call(method=CREATE, arguments=arguments))
    key = idempotency_key(request)
    processor = NewProcessor(
        id=_id_of(tenant, key),
        tenant=tenant,
        session=await session_of(request, server, tenant),
        processor_type=body.processor_type,
        class_type=body.class_type,
        created_at=server.common.clock.now(),
        limit=_limit(server),
    )
    first = Submission(
        tenant=tenant,
        lane=processor.id,
        seq=0,
        kind=OperationKind.CALL,
        digest=_digest(f"{body.processor_type}/{body.class_type}/".encode() + call),
        payload=Payload(inline=call),
        request_key=key,
    )
    accepted = await server.queue.submitter.open_lane(processor, first)
    assert accepted is not None, "a lane opened with an operation answers with its ticket"
    return await answer_accepted(request, server, tenant, accepted.request_id)


@router.post(
    "/call",
    openapi_extra=described(
        CallProcessorResponse,
        body=CallProcessorRequest,
        headers=[HEADER],
        others={202: CallTicket},
        refusals=[404, 410],
        access=Access.TWINKLE,
    ),
)
async def call_processor(request: Request, server: Server, tenant: Caller) -> Response:
    """A method of a processor, in the order of arrival; 410 says that an iterator has no more."""
    _check_served(server)
    async with server.common.bodies.receive(request) as incoming:
        body = await _parsed(server, CallProcessorRequest, incoming.complete())
    processor = await _found(server, body.processor_id, tenant)
    method = method_of(offer_of(processor.processor_type, processor.class_type), body.function)
    arguments = accepted_arguments(body.model_extra or {}, method.takes)
    await _check_named(arguments, server, tenant)
    call = await _encoded(server, Call(method=body.function, arguments=arguments))
    return await answer_call(
        request,
        server,
        Unnumbered(
            tenant=tenant,
            lane=processor.id,
            kind=OperationKind.CALL,
            digest=_digest(call),
            payload=Payload(inline=call),
            request_key=idempotency_key(request),
        ),
    )


@router.delete(
    "/{processor_id}", openapi_extra=described(CreateProcessorResponse, refusals=[404], access=Access.TWINKLE)
)
async def end_processor(processor_id: str, server: Server, tenant: Caller) -> Response:
    """End a processor before its session ends: there is room for another one then."""
    await _found(server, processor_id, tenant)
    await server.common.sql.run(server.artifacts.processors.end, processor_id, tenant)
    return answer(CreateProcessorResponse(processor_id=processor_id))


async def _parsed(server: ServerState, kind: type[BodyT], data: bytes) -> BodyT:
    """The body, with the arguments beside its fields; large ones are read away from the event loop."""
    if len(data) <= _LARGE_BYTES:
        return parse_body(kind, data)
    return await server.common.object_io.run(parse_body, kind, data)


async def _encoded(server: ServerState, call: Call) -> bytes:
    def encode() -> bytes:
        try:
            return encode_call(call)
        except RecursionError as error:
            raise InvalidInput("request", "is nested too deeply") from error

    data: bytes = await server.common.object_io.run(encode)
    if len(data) > server.common.settings.max_body_bytes:
        raise TooLarge(
            f"the request has more than {server.common.settings.max_body_bytes} bytes; upload a file instead"
        )
    return data


async def _found(server: ServerState, processor_id: str, tenant: str) -> Processor:
    if not is_processor_id(processor_id):
        raise NotFound(f"no data set, loader or other processor {processor_id[:100]!r}")
    return await server.common.sql.run(server.artifacts.processors.find, processor_id, tenant)


async def _check_named(arguments: Mapping[str, object], server: ServerState, tenant: str) -> None:
    """Refuse at once what names a file, a path or a processor that is not the tenant's to name."""
    meta = arguments.get(FIELD)
    if meta is not None:
        rows = read_dataset_meta(meta)
        if rows.file_id is not None:
            await server.common.sql.run(partial(server.artifacts.files.find, rows.file_id, tenant))
        if rows.path is not None and not server.common.settings.processor_folders:
            raise InvalidInput(
                FIELD, "names a path of the server, which is not open to clients; upload the file and send its id"
            )
    for name, value in arguments.items():
        if name in REFERENCES and is_processor_id(value):
            assert isinstance(value, str)
            await _found(server, value, tenant)


def _check_served(server: ServerState) -> None:
    if server.common.settings.processors == "off":
        raise InvalidInput(
            "processor",
            "data sets and loaders are not served here (TWINKLE_PROCESSORS=off); use those of twinkle.dataset",
        )


def _id_of(tenant: str, key: str | None) -> str:
    """Of a resend, the id of what it has made."""
    if key is None:
        return PROCESSOR_PREFIX + new_id()
    return PROCESSOR_PREFIX + _digest(f"{tenant}\0{key}".encode())[:32]


def _limit(server: ServerState) -> ProcessorLimit | None:
    settings = server.common.settings
    if not settings.tenant_max_processors:
        return None
    return ProcessorLimit(
        max_processors=settings.tenant_max_processors,
        live_since=server.common.clock.now() - settings.session_timeout_s,
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
