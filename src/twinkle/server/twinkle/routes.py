"""The Twinkle dialect's routes, under ``/api/v1`` as the other's are."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.openai import chat, models
from twinkle.server.twinkle import checkpoints, futures, gateway, model, processors, pushes, runs, sampler

_PREFIX = "/api/v1"
_PARTS = (futures, gateway, runs, checkpoints, pushes, model, sampler, processors)
_OPENAI_PARTS = (chat, models)

router = APIRouter(prefix=_PREFIX)
for part in _PARTS:
    router.include_router(part.router)

openai = APIRouter(prefix=_PREFIX)
"""What upstream's clients ask of OpenAI's routes here: the same, under this prefix too."""
for openai_part in _OPENAI_PARTS:
    openai.include_router(openai_part.router)
