"""The Tinker protocol's routes, under ``/api/v1``."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.tinker import (
    account,
    billing,
    checkpoints,
    copies,
    futures,
    losses,
    models,
    runs,
    sampling,
    service,
    sessions,
    training,
)

router = APIRouter(prefix="/api/v1")
# Routes are tried in this order, and nearly all requests are for the first three.
for part in (
    training,
    futures,
    sampling,
    service,
    sessions,
    models,
    losses,
    checkpoints,
    copies,
    runs,
    billing,
    account,
):
    router.include_router(part.router)
