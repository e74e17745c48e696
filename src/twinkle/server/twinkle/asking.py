"""From a request of the Twinkle dialect's sampler to the samples that it asks for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from twinkle.core.errors import InvalidInput
from twinkle.core.ids import request_id_of
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.model_names import plain_model_name
from twinkle.data_format.sampling import SamplingParams
from twinkle.scheduler.token_stream import SampledInput
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.drawing import ServedModel, find_model, prompt_of
from twinkle.server.openai.ordering import DrawSession, SampleOrder, lane_of, number_of, session_named, shared_session
from twinkle.server.openai.runs import path_of_run
from twinkle.server.receiving.request_metadata import idempotency_key
from twinkle.server.state import ServerState
from twinkle.server.twinkle.adapters import address_of, mesh_of_model
from twinkle.server.twinkle.calls import preferred_wait_s
from twinkle.server.twinkle.folders import brought_in, is_folder
from twinkle.server.twinkle.prompts import PromptTemplate, RowPrompt, read_row
from twinkle.server.twinkle.sessions import REQUEST_HEADER, SESSION_HEADER, session_of
from twinkle.server.twinkle.weights import lane_of_weights
from twinkle.storage.adapters.named import AdapterName
from twinkle.storage.sampling.templates import TemplatePlace
from twinkle.wire.bodies.base import invalid_input
from twinkle.wire.bodies.twinkle_sampling import TwinkleSampleRequest
from twinkle.wire.paths import in_other_scheme, is_model_id, parse_checkpoint_path
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.sampling import SamplingParams as WireParams


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is drawn for a request: the prompts, how, and the model they are drawn from."""

    inputs: list[SampledInput]
    prompts: list[RowPrompt]
    params: SamplingParams
    model: ServedModel
    """The base model, with the checkpoint where one was named or meant."""
    text_model: TextModel | None
    order: SampleOrder


async def served_base(server: ServerState, base_model: str) -> ServedModel:
    """The base model of a path, under whichever of its names.

    Raises:
        NotFound: It is not served here; the words name those that are.
        MeshUnavailable: None is, yet.
    """
    mesh = await mesh_of_model(server, base_model, to_sample=True)
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    name = mesh.capabilities.base_model
    return ServedModel(name=name, base_model=name, checkpoint=None, mesh=mesh.name, capabilities=mesh.capabilities)


def bare_name(name: str) -> str:
    """An adapter's name within its session."""
    return AdapterName(text=name, session=None).parts[1]


async def ask(request: Request, server: ServerState, tenant: str, base_model: str, body: TwinkleSampleRequest) -> Asked:
    """Plan what a request asks for; nothing of it is submitted yet but the save of an adapter's weights.

    Raises:
        UserError: It cannot be.
        TransientError: The weights are not there in time.
        ClientDisconnect: Nobody waits for it any more.
    """
    served = await served_base(server, base_model)
    params = _params(body)
    session = await _session(request, server, tenant)
    key = idempotency_key(request)
    seqs = [number_of(key, str(i)) if key else secrets.randbits(62) for i in range(len(body.inputs))]
    repeated_seq = seqs[0] if key else None
    model, adapter = await _model(request, server, tenant, served, body, session=session, repeated_seq=repeated_seq)
    template = await _template(server, session, served.base_model, body.adapter_name)
    text_model = await server.common.object_io.run(server.artifacts.texts.of, served.capabilities.tokenizer_path)
    prompts = await server.common.texts.run(tenant, _read, server, body, template, text_model, served.capabilities)
    # Behind all that could be refused: it is an operation of the adapter's.
    if adapter is not None:
        lane = await lane_of_weights(request, server, tenant, adapter, repeated_seq=repeated_seq)
    else:
        lane = await lane_of(server, tenant, session, model, repeated_seq=repeated_seq)
    request_ids = [request_id_of(lane, seq) for seq in seqs]
    # Rows may be many and long: not on the event loop.
    inputs = await server.common.object_io.run(_inputs, prompts, params, model, request_ids)
    is_for_later = preferred_wait_s(request) is not None
    order = SampleOrder(
        tenant=tenant,
        samples=[_request(prompt, params, lane, seq) for prompt, seq in zip(prompts, seqs, strict=True)],
        request_ids=request_ids,
        is_repeatable=bool(key) or is_for_later,
        is_background=session.priority < 0,
        inputs=inputs if is_for_later else None,
    )
    return Asked(inputs=inputs, prompts=prompts, params=params, model=model, text_model=text_model, order=order)


def _inputs(
    prompts: Sequence[RowPrompt], params: SamplingParams, model: ServedModel, request_ids: Sequence[str]
) -> list[SampledInput]:
    checkpoint = None if model.checkpoint is None else in_other_scheme(model.checkpoint.path)
    return [
        SampledInput(
            packed_row=SampledInput.pack(prompt.row),
            is_scored_only=params.max_tokens == 0,
            tokenizer_path=model.capabilities.tokenizer_path,
            checkpoint=checkpoint,
            others=[] if i else list(request_ids[1:]),
        )
        for i, prompt in enumerate(prompts)
    ]


async def _session(request: Request, server: ServerState, tenant: str) -> DrawSession:
    """The session of the call, else the one of all the tenant's samples that come without."""
    if not (request.headers.get(SESSION_HEADER) or request.headers.get(REQUEST_HEADER)):
        return await shared_session(server, tenant)
    return await session_named(server, tenant, await session_of(request, server, tenant))


async def _model(
    request: Request,
    server: ServerState,
    tenant: str,
    served: ServedModel,
    body: TwinkleSampleRequest,
    *,
    session: DrawSession,
    repeated_seq: int | None,
) -> tuple[ServedModel, str | None]:
    """What is sampled from: the base model or a checkpoint, or an adapter with its weights of now."""
    if body.adapter_uri is not None:
        path = body.adapter_uri
        if is_model_id(path):
            path = await path_of_run(server, tenant, path, session_id=session.id, repeated_seq=repeated_seq)
        elif is_folder(path):
            path = await _path_of_folder(
                request, server, tenant, served, path, session_id=session.id, repeated_seq=repeated_seq
            )
        path = str(parse_checkpoint_path(path, field="adapter_uri"))
        model = await find_model(server.common, server.queue, server.artifacts, tenant, path)
        return _of_base(model, served, "adapter_uri"), None
    if not body.adapter_name:
        return served, None
    address = await address_of(request, server, tenant, served.base_model, body.adapter_name)
    await server.common.sql.run(server.artifacts.adapters.refuse_unloaded, address.id)
    is_ours = await server.common.sql.run(partial(server.artifacts.named_adapters.has_lane, address.id, tenant=tenant))
    if not is_ours:
        # The other dialect's client numbers its operations itself: nothing can be put into its lane from here.
        path = await path_of_run(server, tenant, address.id, session_id=session.id, repeated_seq=repeated_seq)
        model = await find_model(server.common, server.queue, server.artifacts, tenant, path)
        return _of_base(model, served, "adapter_name"), None
    return served, address.id


async def _path_of_folder(
    request: Request,
    server: ServerState,
    tenant: str,
    served: ServedModel,
    folder: str,
    *,
    session_id: str,
    repeated_seq: int | None,
) -> str:
    """The path of what a folder holds now, or held when a repeated request was first asked."""
    brought = server.artifacts.brought
    if repeated_seq is not None:
        find = partial(
            brought.sampled_before, session_id, folder=folder, base_model=served.base_model, seq=repeated_seq
        )
        before = await server.common.sql.run(find)
        if before is not None:
            return before
    made = await brought_in(
        request, server, tenant, folder, base_model=served.base_model, mesh=served.mesh, field="adapter_uri"
    )
    return made.path


def _of_base(model: ServedModel, served: ServedModel, field: str) -> ServedModel:
    if plain_model_name(model.base_model) != plain_model_name(served.base_model):
        raise InvalidInput(field, f"{model.name} is on {model.base_model}, not on {served.base_model}")
    return model


async def _template(server: ServerState, session: DrawSession, base_model: str, adapter_name: str) -> PromptTemplate:
    place = TemplatePlace(session=session.id, base_model=base_model, adapter_name=bare_name(adapter_name))
    settings = await server.common.sql.run(server.artifacts.sampler_templates.find, place)
    return PromptTemplate() if settings is None else PromptTemplate.of(settings)


def _read(
    server: ServerState,
    body: TwinkleSampleRequest,
    template: PromptTemplate,
    text_model: TextModel | None,
    capabilities: MeshCapabilities,
) -> list[RowPrompt]:
    limits = server.common.settings.picture_limits
    prompts = []
    for number, row in enumerate(body.inputs):
        try:
            prompt = read_row(row, template, text_model, capabilities, limits)
            _check_room(len(prompt.tokens), capabilities)
            prompts.append(prompt)
        except InvalidInput as error:
            raise InvalidInput(
                f"inputs[{number}].{error.field}", error.message.removeprefix(f"{error.field}: ")
            ) from None
    return prompts


def _check_room(num_tokens: int, capabilities: MeshCapabilities) -> None:
    most = capabilities.max_context_length
    if not 1 <= num_tokens < most:
        raise InvalidInput("input_ids", f"are {num_tokens} tokens; this model takes from 1 to {most}, output included")


def _params(body: TwinkleSampleRequest) -> SamplingParams:
    """How to draw. ``num_samples`` beside the params counts where they do not say it."""
    given = dict(body.sampling_params or {})
    if "num_samples" not in given and body.num_samples is not None:
        given["num_samples"] = body.num_samples
    return SamplingParams.from_exactly(given)


def _request(prompt: RowPrompt, params: SamplingParams, lane: str, seq: int) -> SampleRequest:
    scores_only = params.max_tokens == 0
    stop: Any = params.stop if params.stop is None or isinstance(params.stop, str) else list(params.stop)
    try:
        return SampleRequest(
            prompt=prompt_of(prompt.tokens, prompt.pictures),
            sampling_params=WireParams(
                max_tokens=1 if scores_only else params.max_tokens,
                seed=params.seed,
                stop=stop,
                temperature=params.temperature,
                top_k=params.top_k or -1,
                top_p=params.top_p,
                repetition_penalty=params.repetition_penalty,
            ),
            num_samples=params.num_samples,
            sampling_session_id=lane,
            seq_id=seq,
            prompt_logprobs=True if scores_only or params.prompt_logprobs is not None else None,
            topk_prompt_logprobs=params.prompt_logprobs or 0,
            topk_sample_logprobs=params.logprobs if params.logprobs is not None and params.logprobs > 1 else 0,
        )
    except ValidationError as error:
        raise invalid_input(error) from error
