"""The sampler of the Twinkle dialect. Each input is a sample in the journal like any other."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput, NotFound
from twinkle.server.errors import refusal_of
from twinkle.server.openai.answers import JsonObject
from twinkle.server.openai.drawing import Drawing
from twinkle.server.openai.growing_choice import Part, Wanted
from twinkle.server.openai.streaming import Framing, stream_order
from twinkle.server.openapi import Access, Raw, described
from twinkle.server.receiving.request_metadata import HEADER
from twinkle.server.state import Caller, Server, ServerState
from twinkle.server.tinker.answers import answer
from twinkle.server.twinkle.asking import ask, bare_name, served_base
from twinkle.server.twinkle.calls import PREFER
from twinkle.server.twinkle.model import ModelName, model_healthz
from twinkle.server.twinkle.prompts import OWN_WORDING, TEMPLATES, PromptTemplate
from twinkle.server.twinkle.sample_answers import answer_asked
from twinkle.server.twinkle.sessions import session_of
from twinkle.storage.sampling.templates import TemplatePlace
from twinkle.wire.bodies.base import parse_body, read_keys
from twinkle.wire.bodies.twinkle_calls import CallTicket
from twinkle.wire.bodies.twinkle_sampling import (
    AddSamplerAdapterRequest,
    SamplerAdapterAnswer,
    SamplerAnswer,
    SamplerCreateRequest,
    SamplerPatchRequest,
    SetSamplerTemplateRequest,
    TwinkleSampleRequest,
    TwinkleSamples,
)

_PATH = "/{base_model:path}/twinkle"
_LINES = "application/x-ndjson"
_MAX_SETTINGS_BYTES = 64 * 1024
_NO_SETTINGS = ("template_cls", "adapter_name", "model_id")

router = APIRouter(prefix="/sampler")


@router.get("/{base_model:path}/healthz", openapi_extra=described(SamplerAnswer, refusals=[404], access=Access.TWINKLE))
async def sampler_healthz(base_model: ModelName, server: Server, tenant: Caller) -> Response:
    """A live worker samples from the model; 503 while none does."""
    return await model_healthz(base_model, server, tenant)


@router.post(
    _PATH + "/create",
    openapi_extra=described(SamplerAnswer, body=SamplerCreateRequest, refusals=[404], access=Access.TWINKLE),
)
async def create_sampler(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Whether a base model is served; nothing is made for a sampler."""
    parse_body(SamplerCreateRequest, await server.common.bodies.read(request) or b"{}")
    await served_base(server, base_model)
    return answer(SamplerAnswer())


@router.post(
    _PATH + "/set_template",
    openapi_extra=described(SamplerAnswer, body=SetSamplerTemplateRequest, refusals=[404], access=Access.TWINKLE),
)
async def set_sampler_template(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """How conversations become prompts from now on in this session; the tokenizer is the served model's own."""
    raw = await server.common.bodies.read(request)
    body = parse_body(SetSamplerTemplateRequest, raw)
    if body.template_cls not in TEMPLATES:
        raise InvalidInput(
            "template_cls",
            f"{body.template_cls!r} is not offered by the server's sampler, which knows {', '.join(TEMPLATES)};"
            " encode with it yourself and send rows with input_ids",
        )
    model = await served_base(server, base_model)
    if body.model_id is not None and (await _base_or_none(server, body.model_id)) != model.base_model:
        raise InvalidInput("model_id", f"is {body.model_id!r}, but prompts of {model.base_model} take its own template")
    settings = {name: value for name, value in read_keys(raw).items() if name not in _NO_SETTINGS}
    if len(raw) > _MAX_SETTINGS_BYTES:
        raise InvalidInput("body", f"holds more than {_MAX_SETTINGS_BYTES} bytes of settings")
    place = TemplatePlace(
        session=await session_of(request, server, tenant),
        base_model=model.base_model,
        adapter_name=bare_name(body.adapter_name),
    )
    template = PromptTemplate.of({**settings, "is_deepseek_v4": body.template_cls == OWN_WORDING})
    await server.common.sql.run(server.artifacts.sampler_templates.set, place, template.settings())
    return answer(SamplerAnswer())


@router.post(
    _PATH + "/add_adapter_to_sampler",
    openapi_extra=described(SamplerAdapterAnswer, body=AddSamplerAdapterRequest, refusals=[404], access=Access.TWINKLE),
)
async def add_adapter_to_sampler(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Nothing has to be added: the session's adapters are found by their names, with the weights they have then."""
    body = parse_body(AddSamplerAdapterRequest, await server.common.bodies.read(request))
    await served_base(server, base_model)
    session = await session_of(request, server, tenant)
    return answer(SamplerAdapterAnswer(adapter_name=f"{session}-{bare_name(body.adapter_name)}"))


@router.post(
    _PATH + "/apply_patch",
    openapi_extra=described(SamplerAnswer, body=SamplerPatchRequest, refusals=[404], access=Access.TWINKLE),
)
async def patch_sampler(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Refused: there is one base model for all who sample from it."""
    body = parse_body(SamplerPatchRequest, await server.common.bodies.read(request))
    await served_base(server, base_model)
    raise InvalidInput(
        "patch_cls",
        f"{body.patch_cls!r} is not applied: this server samples for all its tenants from one model, and a patch would"
        " change it for everybody; leave the call out",
    )


@router.post(
    _PATH + "/sample",
    openapi_extra=described(
        TwinkleSamples,
        body=TwinkleSampleRequest,
        others={202: CallTicket},
        refusals=[404, 410],
        headers=[HEADER, PREFER],
        access=Access.TWINKLE,
    ),
)
async def sample(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Continue every input; the answer comes when all have ended, unless a ticket is preferred."""
    async with server.common.bodies.receive(request) as received:
        body = await server.common.object_io.run(parse_body, TwinkleSampleRequest, received.complete())
        asked = await ask(request, server, tenant, base_model, body)
    return await answer_asked(request, server, tenant, asked)


@router.post(
    _PATH + "/sample_stream",
    openapi_extra=described(
        Raw(_LINES, 'Lines of JSON, {"delta": text, "finish_reason": null}; the last one says why it ended.'),
        body=TwinkleSampleRequest,
        refusals=[404, 410],
        headers=[HEADER],
        access=Access.TWINKLE,
    ),
)
async def sample_stream(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Continue one input once; its text comes as it grows."""
    async with server.common.bodies.receive(request) as received:
        body = await server.common.object_io.run(parse_body, TwinkleSampleRequest, received.complete())
        asked = await ask(request, server, tenant, base_model, body)
    if len(asked.prompts) != 1 or asked.params.num_samples != 1:
        raise InvalidInput(
            "inputs", f"are {len(asked.prompts)} of {asked.params.num_samples} samples; a stream has one of one"
        )
    if asked.text_model is None:
        raise InvalidInput("inputs", "cannot be streamed as text: the server has no tokenizer of this model")
    (prompt,) = asked.prompts
    room = asked.model.capabilities.max_context_length - len(prompt.tokens)
    drawing = Drawing(
        tokens=prompt.tokens,
        pictures=prompt.pictures,
        num_samples=1,
        max_tokens=asked.params.max_tokens or room,
        topk=0,
        stops=(),
        temperature=asked.params.temperature,
        top_p=asked.params.top_p,
        seed=asked.params.seed,
    )
    wanted = Wanted(scores=False, token_ids=False)
    return await stream_order(server, request, asked.order, asked.text_model, [drawing], _Lines(), wanted, _FRAMING)


def _line(data: bytes) -> bytes:
    return data + b"\n"


_FRAMING = Framing(media_type=_LINES, write=_line, last=None, refusal=refusal_of)


async def _base_or_none(server: ServerState, name: str) -> str | None:
    try:
        return (await served_base(server, name)).base_model
    except NotFound:
        return None


class _Lines:
    """See :class:`twinkle.server.openai.streaming.Form`."""

    def chunks(self, head_id: str, part: Part) -> Iterator[JsonObject]:
        """One line for each part."""
        yield {"delta": part.text, "finish_reason": part.finish_reason}

    def usage(self, head_id: str, usage: JsonObject) -> Iterator[JsonObject]:
        """No counts."""
        yield from ()
