"""Everything a process needs to run jobs, on one event loop: the API in process, and a runner that calls it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
from fastapi import FastAPI

from twinkle.core.clock import Clock
from twinkle.core.job import Job
from twinkle.core.lease import ProcessIdentity
from twinkle.core.settings import Settings
from twinkle.jobs.door import Door
from twinkle.jobs.files import JobFiles
from twinkle.jobs.plans import PlanClasses
from twinkle.jobs.runner import JobRunner, RunnerParts, pause_before
from twinkle.jobs.tools import Tools
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.server.access.acting import Acting, acting_for, allow_acting
from twinkle.server.app import create_app
from twinkle.storage.stores import Stores

_HEARTBEATS_A_TIMEOUT = 5


@asynccontextmanager
async def running_host(
    settings: Settings,
    stores: Stores,
    *,
    clock: Clock,
    plans: PlanClasses,
    open_files: Callable[[Job, Door], JobFiles],
    tools: Tools,
    pause_s: Callable[[int], float] = pause_before,
) -> AsyncIterator[JobRunner]:
    """A runner, for as long as the block lasts; at its end all jobs are given back.

    Args:
        settings: Those of the API too.
        stores: Of the same database.
        clock: What time it is.
        plans: By the kind of job.
        open_files: The files of a job's tenant.
        tools: What plans need of the training library.
        pause_s: How long a job waits before its next attempt, by the number of failures in a row.
    """
    # It listens nowhere: the only way in is the one below.
    app = create_app(settings, clock=clock)
    allow_acting(app)
    async with app.router.lifespan_context(app):
        open_door = partial(_open_door, app, heartbeat_s=settings.session_timeout_s / _HEARTBEATS_A_TIMEOUT)
        runner = JobRunner(
            RunnerParts(
                running=stores.running_jobs,
                waiting=stores.waiting_jobs,
                speeds=stores.speeds,
                clock=clock,
                plans=plans,
                open_door=open_door,
                open_files=open_files,
                tools=tools,
                owner=ProcessIdentity.current(),
                lease_s=settings.job_lease_s,
                tell=CompletionPublisher(settings.redis_url.get_secret_value()).publish,
                pause_s=pause_s,
            )
        )
        try:
            yield runner
        finally:
            await runner.stop()
            await runner.close()


def _open_door(app: FastAPI, job: Job, *, heartbeat_s: float) -> Door:
    acting = Acting(tenant=job.tenant, job=job.id)
    carrier = httpx.ASGITransport(app=acting_for(app, acting), raise_app_exceptions=False)
    return Door(job, carrier, heartbeat_s=heartbeat_s)
