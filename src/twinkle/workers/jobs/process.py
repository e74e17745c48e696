"""The ``twinkle jobs-worker`` process: a Celery worker on the queue of jobs, and one event loop on which they run."""

from __future__ import annotations

import socket
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack
from functools import partial

import structlog
from celery import Celery, signals

from twinkle.client.facade import LoopThread
from twinkle.core.addresses import parse_networks
from twinkle.core.clock import SystemClock
from twinkle.core.process.logs import configure_logging
from twinkle.core.settings import Settings
from twinkle.jobs.plans import PLANS, PlanClasses
from twinkle.jobs.runner import JobRunner
from twinkle.jobs.stored_files import StoredFiles
from twinkle.jobs.webhooks import Webhooks
from twinkle.server.access.signing import Signer, hook_key, secret_of
from twinkle.storage.schema import upgrade_patiently
from twinkle.storage.stores import Stores
from twinkle.tasks.app import make_app
from twinkle.tasks.jobs import JOBS_QUEUE, AttemptReporter, JobDispatcher, register_jobs
from twinkle.tasks.surroundings import check_surroundings
from twinkle.workers.jobs.host import running_host
from twinkle.workers.jobs.toolbox import Toolbox
from twinkle.workers.processors.serving import serving_processors

_log = structlog.get_logger()


class JobsProcess:
    """Runs what messages name, on the loop of a thread of its own. Celery's threads wait for it."""

    def __init__(self, runner: JobRunner, loop: LoopThread, dispatcher: JobDispatcher) -> None:
        self._runner = runner
        self._loop = loop
        self._dispatcher = dispatcher

    def run(self, job: str, reporter: AttemptReporter) -> None:
        """Run an attempt at a job, if it is to be had, and hand out who comes next. Blocks."""
        try:
            ended = self._loop.run(self._runner.run(job, watcher=reporter))
        except CancelledError:
            # The loop was stopped under it: the lease ends by itself, and another runner goes on.
            _log.warning("job.interrupted", job=job)
            return
        if ended is not None:
            self._dispatcher.dispatch()

    def begin_stop(self, **_: object) -> None:
        """Have all jobs given back; Celery ends when their tasks have."""
        _log.info("jobs.stopping", next="running jobs go back and are taken up by the next jobs worker")
        self._loop.begin(self._runner.stop())


def run_jobs_worker(settings: Settings, *, plans: PlanClasses = PLANS) -> int:
    """Run jobs until SIGTERM; the exit status.

    Args:
        settings: Those of the API too.
        plans: By the kind of job.

    Raises:
        ConfigError: The settings do not do for the API in this process.
    """
    configure_logging(settings.log_level, settings.log_json)
    blobs = check_surroundings(settings)
    clock = SystemClock()
    stores = Stores.at(settings.resolved_database_url, clock, limits=settings.tenant_limits)
    upgrade_patiently(stores.database.url, clock)
    app = make_app(settings)
    loop = LoopThread("jobs")
    stack = AsyncExitStack()
    tools = Toolbox(settings, stores, blobs, clock)
    stack.push_async_callback(tools.close)
    host = running_host(
        settings,
        stores,
        clock=clock,
        plans=plans,
        open_files=lambda job, door: StoredFiles(job, stores, blobs, clock),
        tools=tools,
    )
    runner = loop.run(stack.enter_async_context(host))
    signer = Signer(secret_of(settings))
    webhooks = Webhooks(
        hooks=stores.job_hooks,
        key_of=partial(hook_key, signer),
        clock=clock,
        allowed=parse_networks(settings.webhook_networks),
    )
    loop.run(stack.enter_async_context(webhooks.delivering()))
    if settings.processors == "jobs":
        serving = serving_processors(settings, stores, blobs, app=app, clock=clock)
        loop.run(stack.enter_async_context(serving))
    dispatcher = JobDispatcher(app, stores.waiting_jobs, settings.redis_url.get_secret_value())
    process = JobsProcess(runner, loop, dispatcher)
    register_jobs(app, process.run, name_of_tenant=stores.tenants.name_of)
    signals.worker_shutting_down.connect(process.begin_stop)
    try:
        return _work(app, settings)
    finally:
        loop.run(stack.aclose())
        loop.stop()
        stores.close()


def _work(app: Celery, settings: Settings) -> int:
    worker = app.Worker(
        hostname=f"jobs@{socket.gethostname()}",
        pool="threads",
        concurrency=settings.job_concurrency,
        queues=[JOBS_QUEUE],
        loglevel=settings.log_level,
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
