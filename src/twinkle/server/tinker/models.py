"""The birth of an adapter, from a base model or from a checkpoint, and its end. Its first operation has number 0."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from twinkle.core.adapter import AdapterConfig, Checkpoint, CheckpointKind, Dialect
from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.model_names import plain_model_name
from twinkle.core.operation import Accepted, OperationKind, Payload, Submission
from twinkle.scheduler.placement import choose_mesh
from twinkle.server.access.any_key import is_neighbour
from twinkle.server.openapi import described
from twinkle.server.receiving.request_metadata import priority_of
from twinkle.server.state import Accounts, Artifacts, Common, Queue, Server, Tenant
from twinkle.server.tinker.answers import answer, ticket
from twinkle.server.tinker.grants import grant_of, load_payload
from twinkle.storage.journal.meshes import MeshStatus
from twinkle.storage.journal.records import NewAdapter
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.futures import FutureResponse
from twinkle.wire.bodies.training import (
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoraConfig,
    ModelData,
    OptimizerConfig,
    UnloadModelRequest,
)
from twinkle.wire.digest import body_digest
from twinkle.wire.paths import ModelId

# PyTorch takes seeds of 64 bits with a sign.
_SEED_BITS = 63

router = APIRouter()


@router.post("/create_model", openapi_extra=described(FutureResponse, body=CreateModelRequest, refusals=[404]))
async def create_model(request: Request, common: Common, accounts: Accounts, queue: Queue, tenant: Tenant) -> Response:
    """A new adapter on a base model. A resend gets the same one, also when its seed was drawn here."""
    body = parse_body(CreateModelRequest, await common.bodies.read(request))
    session = await common.sql.run(accounts.sessions.find, tenant, body.session_id)
    _check_optimizer(body.optimizer_config)
    is_whole = body.lora_config is None or body.lora_config.rank == 0
    mesh = choose_mesh(await queue.meshes.all(fresh=True), body.base_model, whole_model=is_whole)
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    if body.lora_config is None or is_whole:
        config = AdapterConfig(base_model=mesh.capabilities.base_model, rank=0, seed=0)
    else:
        config = _lora_config(body.lora_config, mesh)
    adapter = NewAdapter(
        id=str(ModelId(body.session_id, body.model_seq_id)),
        tenant=tenant,
        session=body.session_id,
        mesh=mesh.name,
        config=config,
        optimizer=body.optimizer_config.model_dump(exclude_none=True),
        user_metadata=body.user_metadata,
        created_at=common.clock.now(),
        priority=priority_of(body.user_metadata, session.user_metadata),
        limit=await accounts.quotas.adapters_of(tenant),
    )
    payload = config.model_dump_json().encode()
    first = _first(tenant, adapter.id, OperationKind.CREATE_MODEL, payload, body_digest(body))
    await accounts.resends.take_run_of_id(tenant, adapter.id)
    return await _open(queue, adapter, first)


async def create_from_checkpoint(server: Server, tenant: str, body: LoadWeightsRequest) -> Response:
    """A new adapter that begins as a checkpoint: its shape is the checkpoint's, whatever the client remembers of it.

    A resend finds its future, whatever has become of the checkpoint, or of the leave to read it, since then.
    """
    assert body.session_id is not None and body.model_seq_id is not None, "the address of a create-via-load"
    session = await server.common.sql.run(server.accounts.sessions.find, tenant, body.session_id)
    optimizer = body.optimizer_config or OptimizerConfig()
    _check_optimizer(optimizer)
    adapter_id = str(ModelId(body.session_id, body.model_seq_id))
    grant = await grant_of(
        server.common, server.artifacts, tenant, body.path, body.weights_access_token, purpose="load"
    )
    first = _first(tenant, adapter_id, OperationKind.LOAD_WEIGHTS, load_payload(body), body_digest(body))
    try:
        checkpoint = await server.common.sql.run(
            server.artifacts.checkpoints.find, body.path, tenant=tenant, grant=grant
        )
    except NotFound as error:
        return ticket(await _accepted_before(server.queue, first, error), model_id=adapter_id)
    first = replace(first, payload=Payload(inline=load_payload(body, checkpoint.content, grant)))
    _check_origin(checkpoint, body)
    mesh = choose_mesh(
        await server.queue.meshes.all(fresh=True),
        checkpoint.config.base_model,
        whole_model=checkpoint.config.is_whole_model,
    )
    _check_rank(checkpoint.config.rank, mesh)
    adapter = NewAdapter(
        id=adapter_id,
        tenant=tenant,
        session=body.session_id,
        mesh=mesh.name,
        config=checkpoint.config.model_copy(update={"dialect": Dialect.TINKER}),
        optimizer=optimizer.model_dump(exclude_none=True),
        user_metadata=body.user_metadata,
        created_at=server.common.clock.now(),
        priority=priority_of(body.user_metadata, session.user_metadata),
        limit=await server.accounts.quotas.adapters_of(tenant),
    )
    await server.accounts.resends.take_run_of_id(tenant, adapter.id)
    return await _open(server.queue, adapter, first)


@router.post("/unload_model", openapi_extra=described(FutureResponse, body=UnloadModelRequest, refusals=[404]))
async def unload_model(
    request: Request, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """End an adapter, behind everything that was sent for it. Again: the same future. Its checkpoints stay."""
    body = parse_body(UnloadModelRequest, await common.bodies.read(request))
    accepted = await queue.submitter.write(partial(artifacts.adapters.unload, body.model_id, tenant))
    return ticket(accepted, model_id=body.model_id)


@router.post("/get_info", openapi_extra=described(GetInfoResponse, body=GetInfoRequest, refusals=[404]))
async def get_info(request: Request, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant) -> Response:
    """What an adapter is, at once and without a future."""
    body = parse_body(GetInfoRequest, await common.bodies.read(request))
    adapter = await common.sql.run(artifacts.adapters.find, body.model_id, tenant=tenant)
    await common.sql.run(artifacts.adapters.refuse_unloaded, adapter.id)
    mesh = await queue.meshes.find(adapter.mesh)
    capabilities = None if mesh is None else mesh.capabilities
    tells_folder = common.settings.tell_model_folder and is_neighbour(common.settings, request)
    model = ModelData(
        model_name=adapter.config.base_model,
        arch=capabilities.architecture if capabilities else None,
        # The folder on this machine, for nobody but who is on it too.
        tokenizer_id=capabilities.tokenizer_path if capabilities and tells_folder else None,
    )
    return answer(
        GetInfoResponse(
            model_data=model,
            model_id=adapter.id,
            is_lora=not adapter.config.is_whole_model,
            lora_rank=adapter.config.rank or None,
            model_name=adapter.config.base_model,
        )
    )


def _first(tenant: str, adapter_id: str, kind: OperationKind, payload: bytes, digest: str) -> Submission:
    return Submission(tenant=tenant, lane=adapter_id, seq=0, kind=kind, digest=digest, payload=Payload(inline=payload))


async def _open(queue: Queue, adapter: NewAdapter, first: Submission) -> Response:
    accepted = await queue.submitter.open_lane(adapter, first)
    assert accepted is not None, "a lane opened with an operation answers with its ticket"
    return ticket(accepted, model_id=adapter.id)


async def _accepted_before(queue: Queue, first: Submission, error: NotFound) -> Accepted:
    """The future of an operation that can no longer be accepted, but was.

    Raises:
        NotFound: ``error``, since it was not.
        Conflict: Another operation has its number.
    """
    try:
        # An adapter that exists has an operation of this number, so nothing new comes of this.
        return await queue.submitter.submit(first)
    except NotFound:
        raise error from None


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if not optimizer.is_supported:
        raise InvalidInput("optimizer_config.type", f"{optimizer.type!r} is not offered here; use 'adamw'")


def _lora_config(lora: LoraConfig, mesh: MeshStatus) -> AdapterConfig:
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    _check_targets(lora)
    _check_rank(lora.rank, mesh)
    return AdapterConfig(
        base_model=mesh.capabilities.base_model,
        rank=lora.rank,
        seed=secrets.randbits(_SEED_BITS) if lora.seed is None else lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def _check_targets(lora: LoraConfig) -> None:
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise InvalidInput("lora_config", "at least one of train_attn, train_mlp and train_unembed must be true")


def _check_rank(rank: int, mesh: MeshStatus) -> None:
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    if rank > mesh.capabilities.max_rank:
        raise InvalidInput("lora_config.rank", f"must be at most {mesh.capabilities.max_rank} here, not {rank}")


def _check_origin(checkpoint: Checkpoint, body: LoadWeightsRequest) -> None:
    base_model = checkpoint.config.base_model
    if body.base_model is not None and plain_model_name(body.base_model) != plain_model_name(base_model):
        raise InvalidInput("base_model", f"{body.path} was trained on {base_model!r}, not on {body.base_model!r}")
    if body.optimizer and checkpoint.kind is not CheckpointKind.TRAINING:
        raise InvalidInput("optimizer", f"{body.path} has no optimizer state; load a path with /weights/ in it")
