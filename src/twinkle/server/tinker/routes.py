"""The Tinker protocol's routes, under ``/api/v1``."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.connections.direct import DirectRoutes
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

_PREFIX = "/api/v1"
_PARTS = (
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
)

router = APIRouter(prefix=_PREFIX)
for part in _PARTS:
    router.include_router(part.router)

direct = DirectRoutes(_PREFIX, [part.router for part in _PARTS])
