"""The OpenAI-compatible routes, under ``/v1``: text in, text out, over what the service serves anyway."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.openai import batches, chat, completions, fine_tuning, graders, models

router = APIRouter(prefix="/v1")
for part in (batches, chat, completions, fine_tuning, graders, models):
    router.include_router(part.router)
