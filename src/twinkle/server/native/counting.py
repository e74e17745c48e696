"""What requests for samples would take, by the tokenizer and the chat template that would read them."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import UserError
from twinkle.server.openai.chat import plan_turn
from twinkle.server.openai.completions import plan_texts
from twinkle.server.openai.drawing import Drawing, ServedModel
from twinkle.server.openapi import described
from twinkle.server.state import Server, ServerState, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.counting import Counted, CountRequest, CountResponse
from twinkle.wire.bodies.openai import ChatRequest, CompletionRequest

_CHAT = "/v1/chat/completions"

router = APIRouter()


@router.post("/count_tokens", openapi_extra=described(CountResponse, body=CountRequest))
async def count_tokens(request: Request, server: Server, tenant: Tenant) -> Response:
    """Count the tokens of prompts, and how many may be drawn; nothing is drawn."""
    async with server.common.bodies.receive(request) as received:
        body = await server.common.object_io.run(parse_body, CountRequest, received.complete())
        counts = [await _counted(server, tenant, body.endpoint, json.dumps(one).encode()) for one in body.requests]
    return answer(CountResponse(counts=counts))


async def _counted(server: ServerState, tenant: str, endpoint: str, raw: bytes) -> Counted:
    try:
        model, drawings = await _planned(server, tenant, endpoint, raw)
    except UserError as error:
        return Counted(refusal=error.message)
    return Counted(
        base_model=model.base_model,
        prompt_tokens=sum(len(drawing.tokens) for drawing in drawings),
        num_samples=sum(drawing.num_samples for drawing in drawings),
        max_sampled_tokens=sum(drawing.num_samples * drawing.max_tokens for drawing in drawings),
    )


async def _planned(server: ServerState, tenant: str, endpoint: str, raw: bytes) -> tuple[ServedModel, list[Drawing]]:
    if endpoint == _CHAT:
        model, _, drawing = await plan_turn(server, tenant, parse_body(ChatRequest, raw))
        return model, [drawing]
    model, _, drawings = await plan_texts(server, tenant, parse_body(CompletionRequest, raw))
    return model, drawings
