"""``POST /v1/completions``: a text, or token ids, is continued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.answers import (
    Choice,
    JsonObject,
    choices_of,
    completion_logprobs,
    event_stream,
    json_answer,
    usage_of,
)
from twinkle.server.openai.bodies import CompletionRequest
from twinkle.server.openai.callers import Caller
from twinkle.server.openai.drawing import Drawing, ServedModel, draw, find_model, plan
from twinkle.server.openai.shapes import Completion
from twinkle.server.openapi import EVENTS, Access, Raw, described
from twinkle.server.state import Server
from twinkle.wire.bodies.base import parse_body

_DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post(
    "/completions",
    openapi_extra=described(
        Completion,
        Raw(EVENTS, "With `stream`: objects like the answer with a piece of each text, then `[DONE]`."),
        body=CompletionRequest,
        refusals=[404, 410],
        headers=["Idempotency-Key"],
        access=Access.CALLER,
    ),
)
async def create_completion(request: Request, server: Server, tenant: Caller) -> Response:
    """Continue one or several prompts."""
    async with server.bodies.receive(request) as received:
        body = await server.object_io.run(parse_body, CompletionRequest, received.complete())
        model = await find_model(server, tenant, body.model)
        text_model = await server.object_io.run(server.texts.of, model.capabilities.tokenizer_path)
        drawings = await server.object_io.run(_plans, body, model, text_model)
    drawn = await draw(server, request, tenant, model, text_model, drawings)
    choices = await server.object_io.run(choices_of, drawn, drawings, text_model)
    head: JsonObject = {
        "id": f"cmpl-{drawn[0].request_id}",
        "object": "text_completion",
        "created": int(server.clock.now()),
        "model": body.model,
    }
    usage = usage_of(drawn, drawings)
    if body.stream:
        return event_stream(_events(head, choices, usage, body, text_model))
    written = [_choice_json(choice, choice.text, body, text_model) for choice in choices]
    return json_answer({**head, "choices": written, "usage": usage})


def _plans(body: CompletionRequest, model: ServedModel, text_model: TextModel | None) -> list[Drawing]:
    prompts = [prompt if isinstance(prompt, list) else _encode(prompt, model, text_model) for prompt in body.prompt]
    max_tokens = body.max_tokens or _DEFAULT_MAX_TOKENS
    return [plan(body, model, text_model, tokens, topk=body.logprobs or 0, max_tokens=max_tokens) for tokens in prompts]


def _encode(prompt: str, model: ServedModel, text_model: TextModel | None) -> list[int]:
    if text_model is None:
        raise InvalidInput(
            "prompt", f"the server has no tokenizer of {model.base_model} to read texts with; send token ids"
        )
    return text_model.encode(prompt)


def _choice_json(
    choice: Choice, text: str, body: CompletionRequest, text_model: TextModel | None, *, is_last: bool = True
) -> JsonObject:
    written: JsonObject = {
        "index": choice.index,
        "text": text,
        "logprobs": None if body.logprobs is None or not is_last else completion_logprobs(choice, text_model),
        "finish_reason": choice.finish_reason if is_last else None,
    }
    if is_last and (text_model is None or body.return_token_ids):
        written["token_ids"] = choice.tokens
    return written


def _events(
    head: JsonObject,
    choices: Sequence[Choice],
    usage: JsonObject,
    body: CompletionRequest,
    text_model: TextModel | None,
) -> Iterator[JsonObject]:
    for choice in choices:
        # Scores belong to tokens, not to words: with them the text comes in one piece.
        pieces = choice.pieces() if body.logprobs is None else []
        for piece in pieces[:-1]:
            yield {**head, "choices": [_choice_json(choice, piece, body, text_model, is_last=False)]}
        last = pieces[-1] if pieces else choice.text
        yield {**head, "choices": [_choice_json(choice, last, body, text_model)]}
    if body.streams_usage:
        yield {**head, "choices": [], "usage": usage}
