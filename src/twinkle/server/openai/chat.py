"""``POST /v1/chat/completions``: the assistant's next turn, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.answers import (
    Choice,
    JsonObject,
    chat_logprobs,
    choices_of,
    event_stream,
    json_answer,
    usage_of,
)
from twinkle.server.openai.bodies import ChatRequest
from twinkle.server.openai.callers import Caller
from twinkle.server.openai.drawing import Drawing, ServedModel, draw, find_model, plan
from twinkle.server.openai.shapes import ChatCompletion
from twinkle.server.openapi import EVENTS, Access, Raw, described
from twinkle.server.state import Server
from twinkle.wire.bodies.base import parse_body

router = APIRouter(prefix="/chat")


@router.post(
    "/completions",
    openapi_extra=described(
        ChatCompletion,
        Raw(EVENTS, "With `stream`: objects of the kind `chat.completion.chunk`, then `[DONE]`."),
        body=ChatRequest,
        refusals=[404, 410],
        headers=["Idempotency-Key"],
        access=Access.CALLER,
    ),
)
async def create_chat_completion(request: Request, server: Server, tenant: Caller) -> Response:
    """Answer a conversation."""
    async with server.bodies.receive(request) as received:
        body = await server.object_io.run(parse_body, ChatRequest, received.complete())
        model = await find_model(server, tenant, body.model)
        text_model = await server.object_io.run(server.texts.of, model.capabilities.tokenizer_path)
        if text_model is None:
            raise InvalidInput(
                "messages",
                f"the server has no tokenizer of {model.base_model}; send token ids to /v1/completions",
            )
        drawing = await server.object_io.run(_plan, body, model, text_model)
    drawn = await draw(server, request, tenant, model, text_model, [drawing])
    choices = await server.object_io.run(choices_of, drawn, [drawing], text_model)
    head: JsonObject = {
        "id": f"chatcmpl-{drawn[0].request_id}",
        "created": int(server.clock.now()),
        "model": body.model,
    }
    usage = usage_of(drawn, [drawing])
    if body.stream:
        return event_stream(_events({**head, "object": "chat.completion.chunk"}, choices, usage, body, text_model))
    written = [_choice_json(choice, body, text_model) for choice in choices]
    return json_answer({**head, "object": "chat.completion", "choices": written, "usage": usage})


def _plan(body: ChatRequest, model: ServedModel, text_model: TextModel) -> Drawing:
    turns = [message.for_template() for message in body.messages]
    tokens = text_model.encode_chat(turns, body.chat_template_kwargs or {})
    max_tokens = body.max_completion_tokens or body.max_tokens
    return plan(body, model, text_model, tokens, topk=body.top_logprobs or 0, max_tokens=max_tokens)


def _choice_json(choice: Choice, body: ChatRequest, text_model: TextModel) -> JsonObject:
    written: JsonObject = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice, text_model) if body.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if body.return_token_ids:
        written["token_ids"] = choice.tokens
    return written


def _events(
    head: JsonObject, choices: Sequence[Choice], usage: JsonObject, body: ChatRequest, text_model: TextModel
) -> Iterator[JsonObject]:
    for choice in choices:
        yield _event(head, choice, {"role": "assistant", "content": ""})
        if body.logprobs:
            # Scores belong to tokens, not to words: with them the text comes in one piece.
            yield _event(head, choice, {"content": choice.text}, logprobs=chat_logprobs(choice, text_model))
        else:
            for piece in choice.pieces():
                yield _event(head, choice, {"content": piece})
        yield _event(head, choice, {}, finish_reason=choice.finish_reason)
    if body.streams_usage:
        yield {**head, "choices": [], "usage": usage}


def _event(
    head: JsonObject,
    choice: Choice,
    delta: JsonObject,
    *,
    logprobs: JsonObject | None = None,
    finish_reason: str | None = None,
) -> JsonObject:
    written: JsonObject = {
        "index": choice.index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    return {**head, "choices": [written]}
