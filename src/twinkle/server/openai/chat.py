"""``POST /v1/chat/completions``: the assistant's next turn, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput
from twinkle.core.model_names import plain_model_name
from twinkle.core.pictures import PictureLimits
from twinkle.server.admission.offers import picture_rules
from twinkle.server.answering.results import answer_in_parts
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.answers import (
    Choice,
    JsonObject,
    bytes_of,
    chat_logprobs,
    each_choice,
    usage_of,
)
from twinkle.server.openai.drawing import Drawing, ServedModel, find_model, plan
from twinkle.server.openai.growing_choice import Part, Wanted
from twinkle.server.openai.ordering import draw
from twinkle.server.openai.pictures import place_pictures, read_pictures
from twinkle.server.openai.runs import definite_model
from twinkle.server.openai.shapes import ChatCompletion
from twinkle.server.openai.streaming import stream_answer
from twinkle.server.openapi import EVENTS, Access, Raw, described
from twinkle.server.receiving.request_metadata import SESSION_HEADER
from twinkle.server.state import Caller, Server, ServerState
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.openai import ChatRequest
from twinkle.wire.json_pieces import with_array
from twinkle.wire.paths import parse_checkpoint_path

router = APIRouter(prefix="/chat")


@router.post(
    "/completions",
    openapi_extra=described(
        ChatCompletion,
        Raw(EVENTS, "With `stream`: objects of the kind `chat.completion.chunk`, then `[DONE]`."),
        body=ChatRequest,
        refusals=[404, 410],
        headers=["Idempotency-Key", SESSION_HEADER],
        access=Access.CALLER,
    ),
)
async def create_chat_completion(request: Request, server: Server, tenant: Caller) -> Response:
    """Answer a conversation."""
    async with server.common.bodies.receive(request) as received:
        body = await server.common.object_io.run(parse_body, ChatRequest, received.complete())
        body = await _definite(server, request, tenant, body)
        model, text_model, drawing = await plan_turn(server, tenant, body)
    head: JsonObject = {"created": int(server.common.clock.now()), "model": body.model}
    if body.stream:
        wanted = Wanted(scores=bool(body.logprobs), token_ids=bool(body.return_token_ids))
        form = _Chunks({**head, "object": "chat.completion.chunk"}, body, text_model)
        return await stream_answer(server, request, tenant, model, text_model, [drawing], form, wanted)
    drawn = await draw(server, request, tenant, model, text_model, [drawing])
    pieces = with_array(
        {"id": _answer_id(drawn[0].request_id), **head, "object": "chat.completion"},
        "choices",
        (_choice_json(choice, body, text_model) for choice in each_choice(drawn, [drawing], text_model)),
        {"usage": usage_of(drawn, [drawing])},
    )
    return await answer_in_parts(server.common.object_io, pieces, result_bytes=bytes_of(drawn))


async def _definite(server: Server, request: Request, tenant: str, body: ChatRequest) -> ChatRequest:
    """The request with checkpoints in the place of training runs."""
    changes = {"model": await definite_model(server, request, tenant, body.model)}
    if body.adapter_uri is not None:
        changes["adapter_uri"] = await definite_model(server, request, tenant, body.adapter_uri)
    return body.model_copy(update=changes)


async def plan_turn(server: ServerState, tenant: str, body: ChatRequest) -> tuple[ServedModel, TextModel, Drawing]:
    """What answers a conversation, and what is drawn from it.

    Raises:
        UserError: There is no such model, or it cannot answer this.
    """
    model = await find_model(server.common, server.queue, server.artifacts, tenant, _model_name(body))
    if body.adapter_uri is not None and plain_model_name(body.model) != plain_model_name(model.base_model):
        raise InvalidInput("adapter_uri", f"{model.name} is on {model.base_model}, not on {body.model}")
    text_model = await server.common.object_io.run(server.artifacts.texts.of, model.capabilities.tokenizer_path)
    if text_model is None:
        raise InvalidInput(
            "messages",
            f"the server has no tokenizer of {model.base_model}; send token ids to /v1/completions",
        )
    limits = server.common.settings.picture_limits
    return model, text_model, await server.common.texts.run(tenant, _plan, body, model, text_model, limits)


def _model_name(body: ChatRequest) -> str:
    if body.adapter_uri is None:
        return body.model
    return str(parse_checkpoint_path(body.adapter_uri, field="adapter_uri"))


def _plan(body: ChatRequest, model: ServedModel, text_model: TextModel, limits: PictureLimits) -> Drawing:
    urls = body.picture_urls()
    sent = read_pictures(urls, picture_rules(model.capabilities, "messages"), limits) if urls else []
    turns = [message.for_template() for message in body.messages]
    context = model.capabilities.max_context_length
    tokens = text_model.encode_chat(turns, body.chat_template_kwargs or {}, context=context)
    tokens, pictures = place_pictures(tokens, sent, model.capabilities)
    max_tokens = body.max_completion_tokens or body.max_tokens
    topk = body.top_logprobs or 0
    return plan(body, model, text_model, tokens, topk=topk, max_tokens=max_tokens, pictures=pictures)


def _choice_json(choice: Choice, body: ChatRequest, text_model: TextModel) -> JsonObject:
    written: JsonObject = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice.scores(text_model), text_model) if body.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if body.return_token_ids:
        written["token_ids"] = choice.tokens
    return written


class _Chunks:
    """A streamed turn: who speaks, then pieces, then why it ended."""

    def __init__(self, head: JsonObject, body: ChatRequest, text_model: TextModel) -> None:
        self._head = head
        self._body = body
        self._text_model = text_model

    def chunks(self, request_id: str, part: Part) -> Iterator[JsonObject]:
        """See :class:`twinkle.server.openai.streaming.Form`."""
        if part.is_first:
            yield self._chunk(request_id, part, {"role": "assistant", "content": ""})
        if part.text or part.token_ids or (part.scores and part.scores.tokens):
            yield self._chunk(request_id, part, {"content": part.text}, is_piece=True)
        if part.finish_reason is not None:
            yield self._chunk(request_id, part, {}, finish_reason=part.finish_reason)

    def usage(self, request_id: str, usage: JsonObject) -> Iterator[JsonObject]:
        """See :class:`twinkle.server.openai.streaming.Form`."""
        if self._body.streams_usage:
            yield {"id": _answer_id(request_id), **self._head, "choices": [], "usage": usage}

    def _chunk(
        self,
        request_id: str,
        part: Part,
        delta: JsonObject,
        *,
        is_piece: bool = False,
        finish_reason: str | None = None,
    ) -> JsonObject:
        scores = part.scores if is_piece and part.scores and part.scores.tokens else None
        choice: JsonObject = {
            "index": part.index,
            "delta": delta,
            "logprobs": None if scores is None else chat_logprobs(scores, self._text_model),
            "finish_reason": finish_reason,
        }
        if is_piece and part.token_ids:
            choice["token_ids"] = part.token_ids
        return {"id": _answer_id(request_id), **self._head, "choices": [choice]}


def _answer_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"
