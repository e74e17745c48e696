"""``POST /v1/completions``: a text, or token ids, is continued."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput
from twinkle.server.answering.results import answer_in_parts
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.answers import (
    Choice,
    JsonObject,
    bytes_of,
    completion_logprobs,
    each_choice,
    usage_of,
)
from twinkle.server.openai.drawing import Drawing, ServedModel, find_model, plan
from twinkle.server.openai.growing_choice import Part, Wanted
from twinkle.server.openai.ordering import draw
from twinkle.server.openai.runs import definite_model
from twinkle.server.openai.shapes import Completion
from twinkle.server.openai.streaming import stream_answer
from twinkle.server.openapi import EVENTS, Access, Raw, described
from twinkle.server.receiving.request_metadata import SESSION_HEADER
from twinkle.server.state import Caller, Server, ServerState
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.openai import CompletionRequest
from twinkle.wire.json_pieces import with_array

_DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post(
    "/completions",
    openapi_extra=described(
        Completion,
        Raw(EVENTS, "With `stream`: objects like the answer with a piece of each text, then `[DONE]`."),
        body=CompletionRequest,
        refusals=[404, 410],
        headers=["Idempotency-Key", SESSION_HEADER],
        access=Access.CALLER,
    ),
)
async def create_completion(request: Request, server: Server, tenant: Caller) -> Response:
    """Continue one or several prompts."""
    async with server.common.bodies.receive(request) as received:
        body = await server.common.object_io.run(parse_body, CompletionRequest, received.complete())
        body = body.model_copy(update={"model": await definite_model(server, request, tenant, body.model)})
        model, text_model, drawings = await plan_texts(server, tenant, body)
    head: JsonObject = {"object": "text_completion", "created": int(server.common.clock.now()), "model": body.model}
    if body.stream:
        token_ids = text_model is None or bool(body.return_token_ids)
        wanted = Wanted(scores=body.logprobs is not None, token_ids=token_ids)
        form = _Chunks(head, body, text_model)
        return await stream_answer(server, request, tenant, model, text_model, drawings, form, wanted)
    drawn = await draw(server, request, tenant, model, text_model, drawings)
    pieces = with_array(
        {"id": _answer_id(drawn[0].request_id), **head},
        "choices",
        (_choice_json(choice, body, text_model) for choice in each_choice(drawn, drawings, text_model)),
        {"usage": usage_of(drawn, drawings)},
    )
    return await answer_in_parts(server.common.object_io, pieces, result_bytes=bytes_of(drawn))


async def plan_texts(
    server: ServerState, tenant: str, body: CompletionRequest
) -> tuple[ServedModel, TextModel | None, list[Drawing]]:
    """What continues texts, and what is drawn from each.

    Raises:
        UserError: There is no such model, or it cannot answer this.
    """
    model = await find_model(server.common, server.queue, server.artifacts, tenant, body.model)
    text_model = await server.common.object_io.run(server.artifacts.texts.of, model.capabilities.tokenizer_path)
    return model, text_model, await server.common.texts.run(tenant, _plans, body, model, text_model)


def _plans(body: CompletionRequest, model: ServedModel, text_model: TextModel | None) -> list[Drawing]:
    prompts = [prompt if isinstance(prompt, list) else _encode(prompt, model, text_model) for prompt in body.prompt]
    max_tokens = body.max_tokens or _DEFAULT_MAX_TOKENS
    return [plan(body, model, text_model, tokens, topk=body.logprobs or 0, max_tokens=max_tokens) for tokens in prompts]


def _encode(prompt: str, model: ServedModel, text_model: TextModel | None) -> list[int]:
    if text_model is None:
        raise InvalidInput(
            "prompt", f"the server has no tokenizer of {model.base_model} to read texts with; send token ids"
        )
    return text_model.encode(prompt, context=model.capabilities.max_context_length)


def _choice_json(choice: Choice, body: CompletionRequest, text_model: TextModel | None) -> JsonObject:
    scored = body.logprobs is not None
    written: JsonObject = {
        "index": choice.index,
        "text": choice.text,
        "logprobs": completion_logprobs(choice.scores(text_model), text_model) if scored else None,
        "finish_reason": choice.finish_reason,
    }
    if text_model is None or body.return_token_ids:
        written["token_ids"] = choice.tokens
    return written


class _Chunks:
    """A streamed completion: each chunk has the form of the whole."""

    def __init__(self, head: JsonObject, body: CompletionRequest, text_model: TextModel | None) -> None:
        self._head = head
        self._body = body
        self._text_model = text_model

    def chunks(self, request_id: str, part: Part) -> Iterator[JsonObject]:
        """See :class:`twinkle.server.openai.streaming.Form`."""
        scores = part.scores if part.scores and part.scores.tokens else None
        choice: JsonObject = {
            "index": part.index,
            "text": part.text,
            "logprobs": None if scores is None else completion_logprobs(scores, self._text_model),
            "finish_reason": part.finish_reason,
        }
        if part.token_ids:
            choice["token_ids"] = part.token_ids
        yield {"id": _answer_id(request_id), **self._head, "choices": [choice]}

    def usage(self, request_id: str, usage: JsonObject) -> Iterator[JsonObject]:
        """See :class:`twinkle.server.openai.streaming.Form`."""
        if self._body.streams_usage:
            yield {"id": _answer_id(request_id), **self._head, "choices": [], "usage": usage}


def _answer_id(request_id: str) -> str:
    return f"cmpl-{request_id}"
