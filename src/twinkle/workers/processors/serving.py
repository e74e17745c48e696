"""Processors served: by a jobs worker beside its jobs, or by ``twinkle processors``, a process of their own."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import redis
import structlog
from celery import Celery

from twinkle.core.clock import Clock, SystemClock
from twinkle.core.lease import ProcessIdentity
from twinkle.core.process.background import say_if_it_ends
from twinkle.core.process.logs import configure_logging
from twinkle.core.processors import PROCESSORS_MESH
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import ChannelListener, CompletionPublisher
from twinkle.storage.blobs import BlobStore
from twinkle.storage.schema import upgrade_patiently
from twinkle.storage.stores import Stores
from twinkle.tasks.app import make_app
from twinkle.tasks.nudge import bell_key, ring_channel
from twinkle.tasks.surroundings import check_surroundings
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.processors.assembling import Assembler
from twinkle.workers.processors.children import Children
from twinkle.workers.processors.worker import ProcessorParts, ProcessorWorker
from twinkle.workers.report import OperationReporter

_SOCKET_TIMEOUT_S = 5.0
_BELL_TTL_MS = 30_000
_BELL_EVERY_S = 10.0

_log = structlog.get_logger()


@asynccontextmanager
async def serving_processors(
    settings: Settings, stores: Stores, blobs: BlobStore, *, app: Celery, clock: Clock
) -> AsyncIterator[ProcessorWorker]:
    """Serve them on this event loop while the block runs. Nothing heavy is loaded here, and nothing before a call."""
    redis_url = settings.redis_url.get_secret_value()
    reporter = OperationReporter(app, f"processors@{socket.gethostname()}", name_of_tenant=stores.tenants.name_of)
    keeper = LeaseKeeper(
        meshes=stores.meshes,
        mesh=PROCESSORS_MESH,
        identity=ProcessIdentity.current(),
        capabilities=None,
        lease_s=settings.lease_s,
    )
    with tempfile.TemporaryDirectory(prefix="twinkle-processors-", ignore_cleanup_errors=True) as folder:
        children = Children(
            settings.processor_processes,
            folder=Path(folder),
            call_s=settings.processor_call_s,
            reward_s=settings.processor_reward_s,
            memory_bytes=settings.processor_memory_bytes,
            idle_s=settings.processor_process_idle_s,
        )
        worker = ProcessorWorker(
            ProcessorParts(
                stores=stores,
                blobs=blobs,
                keeper=keeper,
                assembler=Assembler(
                    stores,
                    blobs,
                    object_store=settings.resolved_object_store,
                    folder=folder,
                    disk_bytes=settings.processor_disk_bytes,
                    folders=tuple(settings.processor_folders),
                ),
                children=children,
                publisher=CompletionPublisher(redis_url),
                reporter=reporter,
                clock=clock,
                inline_bytes=settings.inline_payload_bytes,
                max_attempts=settings.max_attempts,
                sweep_s=settings.sweep_s,
            )
        )
        loop = asyncio.get_running_loop()

        def hear(_: list[str]) -> None:
            loop.call_soon_threadsafe(worker.ring)

        listener = ChannelListener(redis_url, ring_channel(PROCESSORS_MESH), hear)
        reporter.start()
        keeper.start()
        listener.start()
        tasks = [
            asyncio.create_task(worker.run(), name="processors"),
            asyncio.create_task(_keep_bell_up(redis_url), name="bell"),
        ]
        for task in tasks:
            say_if_it_ends(task)
        try:
            yield worker
        finally:
            await worker.stop()
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await children.close()
            await asyncio.to_thread(listener.stop)
            await asyncio.to_thread(reporter.close)
            await asyncio.to_thread(keeper.stop)


async def _keep_bell_up(redis_url: str) -> None:
    """Hear rings without Celery's messages, which nobody here would take."""
    connection = redis.Redis.from_url(redis_url, socket_timeout=_SOCKET_TIMEOUT_S)
    while True:
        try:
            await asyncio.to_thread(connection.set, bell_key(PROCESSORS_MESH), 1, px=_BELL_TTL_MS)
        except redis.RedisError as error:
            _log.debug("processors.bell_down", error=str(error), next="the sweep looks")
        await asyncio.sleep(_BELL_EVERY_S)


def run_processors(settings: Settings) -> int:
    """Serve processors until SIGTERM; the exit status."""
    configure_logging(settings.log_level, settings.log_json)
    blobs = check_surroundings(settings)
    clock = SystemClock()
    stores = Stores.at(settings.resolved_database_url, clock, limits=settings.tenant_limits)
    upgrade_patiently(stores.database.url, clock)
    asyncio.run(_until_asked_to_stop(settings, stores, blobs, clock))
    stores.close()
    return 0


async def _until_asked_to_stop(settings: Settings, stores: Stores, blobs: BlobStore, clock: Clock) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    with suppress(asyncio.CancelledError):
        async with serving_processors(settings, stores, blobs, app=make_app(settings), clock=clock):
            _log.info("processors.serving")
            await asked.wait()
