"""The OpenAI-compatible routes, under ``/v1``: text in, text out, over what the service serves anyway."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.openai import batches, chat, completions, files, fine_tuning, graders, models, uploads

router = APIRouter(prefix="/v1")
for part in (batches, chat, completions, files, fine_tuning, graders, models, uploads):
    router.include_router(part.router)
