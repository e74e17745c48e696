"""Our own routes, under ``/api/native/v1``: what ``twinkle.client`` asks beyond the Tinker protocol."""

from __future__ import annotations

from fastapi import APIRouter

from twinkle.server.native import access_tokens, counting, files, job_members, jobs, lists, queues, runs

router = APIRouter(prefix="/api/native/v1")
for part in (queues, lists, runs, access_tokens, files, jobs, job_members, counting):
    router.include_router(part.router)
