"""The Twinkle dialect's routes, under ``/api/v1`` as the other's are."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.twinkle import futures

_PARTS = (futures,)

router = APIRouter(prefix="/api/v1")
for part in _PARTS:
    router.include_router(part.router)
