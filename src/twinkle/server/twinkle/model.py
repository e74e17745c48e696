"""Models: what is served, the birth of adapters, and every call of a model's methods."""

from __future__ import annotations

import hashlib
import secrets
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from twinkle.core.adapter import WARNINGS, AdapterConfig, Dialect
from twinkle.core.errors import InvalidInput, MeshUnavailable, NotFound
from twinkle.core.operation import OperationKind, Payload, Unnumbered
from twinkle.server.admission.offers import capabilities_of_run, why_no_embeddings
from twinkle.server.errors import JSON
from twinkle.server.openapi import Access, Raw, described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key, priority_of
from twinkle.server.state import Caller, Server, ServerState
from twinkle.server.tinker.answers import answer
from twinkle.server.twinkle.adapters import address_of, mesh_of_model
from twinkle.server.twinkle.calls import PREFER, answer_accepted
from twinkle.server.twinkle.sessions import SESSION_HEADER, session_of
from twinkle.storage.adapters.named import AdapterName
from twinkle.storage.journal.meshes import MeshStatus
from twinkle.storage.journal.records import NewAdapter
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.twinkle_calls import (
    AdapterCreated,
    AdapterRemoved,
    AddAdapterRequest,
    CallTicket,
    MethodCall,
    ModelOpened,
    OpenModelRequest,
    RemoveAdapterRequest,
)
from twinkle.wire.calls import CALL_KINDS
from twinkle.wire.digest import body_digest
from twinkle.wire.peft_requests import ReadPeft, read_peft
from twinkle.wire.twinkle_requests import CallRequest, read_call

# PyTorch takes seeds of 64 bits with a sign.
_SEED_BITS = 63
_OWN_ROUTES = frozenset({"add_adapter_to_model", "save", "load", "resume_from_checkpoint"})
METHODS = tuple(sorted(CALL_KINDS.keys() - _OWN_ROUTES))
"""Those whose arguments go to the worker as they came."""
CALL_HEADERS = (HEADER, PREFER, SESSION_HEADER)
RESULT = Raw(JSON, 'The result: null, or {"result": ...}.')

ModelName = Annotated[str, Path()]
Method = Annotated[str, Path(json_schema_extra={"enum": list(METHODS)})]

router = APIRouter(prefix="/model")


@router.get("/{base_model:path}/healthz", openapi_extra=described(ModelOpened, refusals=[404], access=Access.TWINKLE))
async def model_healthz(base_model: ModelName, server: Server, _: Caller) -> Response:
    """A live worker serves the model; 503 while none does."""
    mesh = await mesh_of_model(server, base_model)
    if not mesh.alive:
        raise MeshUnavailable(f"no worker that serves {base_model!r} is running; operations are kept until one is back")
    return answer(ModelOpened())


@router.post(
    "/{base_model:path}/twinkle/create",
    openapi_extra=described(ModelOpened, body=OpenModelRequest, refusals=[404], access=Access.TWINKLE),
)
async def open_model(base_model: ModelName, request: Request, server: Server, _: Caller) -> Response:
    """The model is served, and adapters may be added to it."""
    parse_body(OpenModelRequest, await server.common.bodies.read(request))
    await mesh_of_model(server, base_model)
    return answer(ModelOpened())


@router.post(
    "/{base_model:path}/twinkle/add_adapter_to_model",
    openapi_extra=described(
        AdapterCreated,
        body=AddAdapterRequest,
        others={202: CallTicket},
        refusals=[404, 500],
        headers=CALL_HEADERS,
        access=Access.TWINKLE,
    ),
)
async def add_adapter(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """A new adapter under a name of the session's, answered when it has been made."""
    body = parse_body(AddAdapterRequest, await server.common.bodies.read(request))
    peft = _judged(body)
    mesh = await mesh_of_model(server, base_model, whole_model=peft is None)
    session_id = await session_of(request, server, tenant)
    name = AdapterName(text=body.adapter_name, session=session_id).parts
    if name[0] != session_id:
        raise InvalidInput("adapter_name", "begins as another session's id; send a name without one")
    session = await server.common.sql.run(server.accounts.sessions.find, tenant, session_id)
    config = _config_of(body, peft, mesh)
    warnings = (*(() if peft is None else peft.warnings), *_unused(body))
    adapter = NewAdapter(
        id="",
        tenant=tenant,
        session=session.id,
        mesh=mesh.name,
        config=config,
        optimizer={},
        user_metadata={WARNINGS: "\n".join(warnings)} if warnings else None,
        created_at=server.common.clock.now(),
        priority=priority_of(session.user_metadata),
        limit=await server.accounts.quotas.adapters_of(tenant),
    )
    first = Unnumbered(
        tenant=tenant,
        lane="",
        kind=OperationKind.CREATE_MODEL,
        digest=hashlib.sha256(f"{config.base_model} {body_digest(body)}".encode()).hexdigest(),
        payload=Payload(inline=config.model_dump_json().encode()),
        request_key=idempotency_key(request),
    )
    named = server.artifacts.named_adapters
    await server.accounts.resends.take_run(tenant, partial(named.has, adapter, name=name[1], first=first))
    accepted = await server.queue.submitter.write(partial(named.open, adapter, name=name[1], first=first))
    return await answer_accepted(request, server, tenant, accepted.request_id)


@router.post(
    "/{base_model:path}/twinkle/remove_adapter",
    openapi_extra=described(
        AdapterRemoved,
        body=RemoveAdapterRequest,
        others={202: CallTicket},
        refusals=[404, 500],
        headers=CALL_HEADERS,
        access=Access.TWINKLE,
    ),
)
async def remove_adapter(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """End an adapter, behind its earlier calls. Again: the same. Its checkpoints stay, and its name is free."""
    body = parse_body(RemoveAdapterRequest, await server.common.bodies.read(request))
    lane = (await address_of(request, server, tenant, base_model, body.adapter_name)).id
    unload = partial(server.artifacts.adapters.unload, lane, tenant, request_key=idempotency_key(request))
    accepted = await server.queue.submitter.write(unload)
    return await answer_accepted(request, server, tenant, accepted.request_id)


@router.post(
    "/{base_model:path}/twinkle/{method}",
    openapi_extra=described(
        RESULT,
        body=MethodCall,
        others={202: CallTicket},
        refusals=[404, 500],
        headers=CALL_HEADERS,
        access=Access.TWINKLE,
    ),
)
async def call_method(
    base_model: ModelName, method: Method, request: Request, server: Server, tenant: Caller
) -> Response:
    """A call of one of the model's methods, behind the adapter's earlier ones; the answer is its result."""
    if method not in METHODS:
        raise NotFound(f"no method {method!r} of a model; there are {', '.join(METHODS)}")
    async with server.common.bodies.receive(request) as body:
        raw = body.complete()
        if len(raw) <= server.common.settings.inline_payload_bytes:
            call = _read(method, raw)
        else:
            call = await server.common.object_io.run(_read, method, raw)
        server.common.settings.operation_limits.check_pass(call.num_tokens)
        lane = (await address_of(request, server, tenant, base_model, call.adapter_name)).id
        if call.embeds:
            await _require_embeddings(server, tenant, lane)
        accepted = await server.queue.submitter.submit(unnumbered(request, tenant, lane, call))
    return await answer_accepted(request, server, tenant, accepted.request_id)


async def _require_embeddings(server: ServerState, tenant: str, adapter_id: str) -> None:
    capabilities = await capabilities_of_run(server.common, server.artifacts, server.queue, tenant, adapter_id)
    if why_no_embeddings(capabilities, "it") is not None:
        raise InvalidInput(
            "task",
            "is 'embedding', which the mesh of this adapter does not compute (its engine is megatron); train on a mesh"
            " whose engine is transformers",
        )


def _read(method: str, raw: bytes) -> CallRequest:
    return read_call(method, parse_body(MethodCall, raw))


def unnumbered(request: Request, tenant: str, lane: str, call: CallRequest) -> Unnumbered:
    """A call on its way into an adapter's lane."""
    return Unnumbered(
        tenant=tenant,
        lane=lane,
        kind=call.kind,
        digest=call.digest,
        payload=Payload(inline=call.payload),
        num_tokens=call.num_tokens,
        request_key=idempotency_key(request),
    )


def _judged(body: AddAdapterRequest) -> ReadPeft | None:
    """What is asked for of an adapter; None where the whole model is to be trained."""
    if not body.is_trainable:
        raise InvalidInput("is_trainable", "must be true: what is only sampled from needs no adapter here")
    return None if body.config is None else read_peft(body.config)


def _unused(body: AddAdapterRequest) -> tuple[str, ...]:
    if body.save_dir is None:
        return ()
    return ("save_dir is not used: checkpoints are kept in the server's store, under twinkle:// paths",)


def _config_of(body: AddAdapterRequest, peft: ReadPeft | None, mesh: MeshStatus) -> AdapterConfig:
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    if peft is None:
        return AdapterConfig(
            base_model=mesh.capabilities.base_model,
            rank=0,
            seed=0,
            dialect=Dialect.TWINKLE,
            gradient_accumulation_steps=body.gradient_accumulation_steps,
        )
    _check_rank(peft.settings.r, mesh)
    return AdapterConfig(
        base_model=mesh.capabilities.base_model,
        rank=peft.settings.r,
        alpha=peft.settings.lora_alpha,
        seed=secrets.randbits(_SEED_BITS) if body.seed is None else body.seed,
        train_unembed=False,
        dialect=Dialect.TWINKLE,
        peft=peft.kept,
        gradient_accumulation_steps=body.gradient_accumulation_steps,
    )


def _check_rank(rank: int, mesh: MeshStatus) -> None:
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    if rank > mesh.capabilities.max_rank:
        raise InvalidInput("config.r", f"must be at most {mesh.capabilities.max_rank} here, not {rank}")
