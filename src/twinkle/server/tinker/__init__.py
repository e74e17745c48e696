"""The Tinker protocol's routes, under ``/api/v1``."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.tinker import checkpoints, futures, models, runs, sampling, service, sessions, training

router = APIRouter(prefix="/api/v1")
for part in (service, sessions, models, training, sampling, futures, checkpoints, runs):
    router.include_router(part.router)
