"""The API as an ASGI app. Everything it needs is opened when it starts and closed when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import structlog
from fastapi import Depends, FastAPI, Request

from twinkle.core import __version__
from twinkle.core.clock import Clock, SystemClock
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.file_names import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from twinkle.core.settings import Settings
from twinkle.grading.rewards import RewardProcesses
from twinkle.scheduler.channels import COMPLETIONS, ChannelListener
from twinkle.scheduler.token_stream import token_channel
from twinkle.server import health
from twinkle.server.access.auth import Keys, Tokens
from twinkle.server.access.joining import Membership
from twinkle.server.access.links import DownloadLinks
from twinkle.server.access.sealing import Sealer
from twinkle.server.access.signing import Cursors, Signer, hook_key, secret_of
from twinkle.server.admission.holding import HoldingLimits
from twinkle.server.admission.quota import Quotas
from twinkle.server.answering import downloads
from twinkle.server.answering.held_results import HeldResults
from twinkle.server.answering.job_polls import JobPolls
from twinkle.server.answering.lane_polls import LanePolls
from twinkle.server.answering.token_feeds import TokenFeeds
from twinkle.server.answering.turns import Turns
from twinkle.server.boards import MeshBoard, QueueBoard
from twinkle.server.connections.free_memory import FreedMemory
from twinkle.server.errors import install_error_answers
from twinkle.server.fine_tuned import FineTunedModels
from twinkle.server.futures import Futures
from twinkle.server.model_texts import Texts
from twinkle.server.native import router as native_router
from twinkle.server.openai import router as openai_router
from twinkle.server.openapi import Api
from twinkle.server.openapi import router as openapi_router
from twinkle.server.readiness import ObjectBoard
from twinkle.server.receiving.body import Bodies, ByteBudget
from twinkle.server.receiving.in_progress import RequestsInProgress
from twinkle.server.receiving.resends import Resends
from twinkle.server.state import AccountParts, ArtifactParts, CommonParts, JobParts, QueueParts, ServerState
from twinkle.server.submit import Submitter
from twinkle.server.threads import Listings, Threads
from twinkle.server.tinker.routes import direct as tinker_direct
from twinkle.server.tinker.routes import router as tinker_router
from twinkle.server.twinkle.routes import openai as twinkle_openai_router
from twinkle.server.twinkle.routes import router as twinkle_router
from twinkle.storage import schema
from twinkle.storage.blobs import BlobStore, open_blob_store
from twinkle.storage.database import Database
from twinkle.storage.disks import Disks, keep_room, make_way
from twinkle.storage.home import make_private_home
from twinkle.storage.journal.arrivals import Arrivals
from twinkle.storage.opened_folders import OpenedFolders
from twinkle.storage.stores import Stores
from twinkle.tasks.app import make_app
from twinkle.tasks.jobs import JobBell, JobDispatcher
from twinkle.tasks.nudge import Nudger

_SQL_THREADS = 8
_OBJECT_THREADS = 8
# Lists of everything that a tenant has: beside all that is quick.
_LISTING_THREADS = 4
# Texts are cut into tokens, and conversations written, with the interpreter's lock held in part.
_TEXT_THREADS = 2
# Traces are seldom asked for and may take long: one at a time, beside everything else.
_TRACE_THREADS = 1

_log = structlog.get_logger()


def create_app(settings: Settings, *, clock: Clock | None = None) -> FastAPI:
    """The app for one set of settings; it opens nothing before its lifespan begins.

    Raises:
        ConfigError: There is no broker to nudge the workers through, or the database is of an unknown kind.
    """
    if not settings.redis_url.get_secret_value():
        raise ConfigError("TWINKLE_REDIS_URL: the API needs a broker; `twinkle serve` starts one by itself")
    database = Database(settings.resolved_database_url, statement_timeout_s=settings.statement_timeout_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            assert isinstance(app, Api)
            server = app.state.server = await _open(settings, database, clock or SystemClock(), app.freed, stack)
            await app.build_routes()
            app.results, app.in_progress = server.common.results, server.common.in_progress
            _log.info("api.started", host=settings.host, port=settings.port)
            yield
        _log.info("api.stopped")

    app = Api(
        title="Twinkle",
        version=__version__,
        summary="Training of many tenants' LoRA adapters on one base model, and sampling from them.",
        lifespan=lifespan,
        # The document has a route of its own.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(_refuse_nul)],
    )
    app.state.allows_acting = False
    install_error_answers(app)
    app.include_router(health.router)
    app.include_router(downloads.router)
    app.include_router(tinker_router, tags=["tinker"])
    app.include_router(twinkle_router, tags=["twinkle"])
    app.include_router(native_router, tags=["native"])
    app.include_router(openai_router, tags=["openai"])
    app.include_router(twinkle_openai_router, tags=["openai"])
    app.include_router(openapi_router)
    app.direct = tinker_direct
    app.freed, app.writing, app.turns = FreedMemory(), asyncio.Lock(), Turns()
    app.mounted_at, app.public_url = settings.mounted_at, settings.public_url
    return app


async def _refuse_nul(request: Request) -> None:
    # PostgreSQL cannot look for NUL. Bodies' texts are judged where they are parsed.
    if "\x00" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise InvalidInput("path", "must not contain NUL characters, nor may the query")


async def _open(
    settings: Settings, database: Database, clock: Clock, freed: FreedMemory, stack: AsyncExitStack
) -> ServerState:
    """Build the parts from the bottom up; the stack closes them from the top down."""
    sql = _threads("sql", _SQL_THREADS, stack)
    object_io = _threads("objects", _OBJECT_THREADS, stack)
    await sql.run(prepare_database, settings)
    stores = Stores(database, clock, limits=settings.tenant_limits)
    common = CommonParts(
        settings=settings,
        clock=clock,
        disks=Disks.of(settings, clock),
        sql=sql,
        listings=Listings(_threads("listings", _LISTING_THREADS, stack)),
        texts=Listings(_threads("texts", _TEXT_THREADS, stack)),
        results=HeldResults(settings.max_result_bytes_in_flight, freed),
        in_progress=RequestsInProgress(per_tenant=settings.tenant_max_requests, per_key=settings.max_requests_per_key),
        freed=freed,
        object_io=object_io,
        bodies=Bodies(
            max_bytes=settings.max_body_bytes,
            budget=ByteBudget(settings.max_body_bytes_in_flight, freed=freed),
            threads=object_io,
            inline_bytes=settings.inline_payload_bytes,
        ),
    )
    signer = Signer(await sql.run(secret_of, settings))
    membership = Membership(stores.deployment, signer, sql)
    await membership.start()
    stack.push_async_callback(membership.stop)
    blobs = await object_io.run(open_blob_store, settings.resolved_object_store)
    accounts = _accounts(common, stores, signer)
    queue = _queue(common, stores, blobs, accounts.resends, stack)
    jobs = _jobs(common, stores, signer, stack)
    _start_listener(settings, stack, queue.futures.notify, queue.lane_polls.notify, jobs.polls.notify)
    return ServerState(
        common=common,
        accounts=accounts,
        queue=queue,
        jobs=jobs,
        artifacts=ArtifactParts(
            adapters=stores.adapters,
            named_adapters=stores.named_adapters,
            checkpoints=stores.checkpoints,
            brought=stores.brought,
            folders=OpenedFolders(
                settings.load_folders,
                names=(ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE),
                max_bytes=settings.load_folder_bytes,
            ),
            fine_tuned=FineTunedModels(stores.jobs),
            access_tokens=stores.access_tokens,
            pushes=stores.pushes,
            sampling_sessions=stores.sampling_sessions,
            sampler_templates=stores.sampler_templates,
            files=stores.files,
            processors=stores.processors,
            uploads=stores.uploads,
            blobs=blobs,
            object_board=ObjectBoard(blobs, clock, object_io),
            links=DownloadLinks(
                signer,
                clock,
                blobs,
                lifetime_s=settings.download_url_ttl_s,
                presigned_lifetime_s=settings.presigned_url_ttl_s if settings.presign_downloads else None,
            ),
            texts=Texts(clock),
        ),
    )


def _accounts(common: CommonParts, stores: Stores, signer: Signer) -> AccountParts:
    settings, clock, sql = common.settings, common.clock, common.sql
    tokens = Tokens(signer, clock, lifetime_s=settings.jwt_ttl_s)
    quotas = Quotas(
        stores.journal,
        stores.tenants,
        clock,
        sql,
        max_body_bytes=settings.max_body_bytes,
        all_body_bytes=settings.max_body_bytes_in_flight,
        session_timeout_s=settings.session_timeout_s,
    )
    holdings = HoldingLimits(stores.holdings, quotas, clock, sql)
    return AccountParts(
        tenants=stores.tenants,
        sessions=stores.sessions,
        accounting=stores.accounting,
        audit=stores.audit,
        keys=Keys(stores.tenants, clock, sql, tokens, takes_any=settings.any_key),
        tokens=tokens,
        cursors=Cursors(signer),
        quotas=quotas,
        holdings=holdings,
        resends=Resends(Arrivals(stores.database), holdings, stores.sessions, sql),
    )


def _queue(
    common: CommonParts, stores: Stores, blobs: BlobStore, resends: Resends, stack: AsyncExitStack
) -> QueueParts:
    settings, clock, sql = common.settings, common.clock, common.sql
    futures = Futures(stores.journal)
    futures.start()
    stack.push_async_callback(futures.stop)
    submitter = Submitter(
        stores.journal,
        blobs,
        _start_nudger(settings, stack),
        futures,
        blob_threads=common.object_io,
        inline_bytes=settings.inline_payload_bytes,
        max_pending=settings.max_pending_submissions,
        timeout_s=settings.submit_timeout_s,
        clock=clock,
        admit=resends.admit,
    )
    stack.push_async_callback(submitter.stop)
    lane_polls = LanePolls(stores.sampling_sessions, sql)
    lane_polls.start()
    stack.push_async_callback(lane_polls.stop)
    meshes = MeshBoard(stores.meshes, clock, sql, silent_s=settings.session_timeout_s)
    return QueueParts(
        submitter=submitter,
        futures=futures,
        lane_polls=lane_polls,
        token_feeds=_start_token_feeds(settings, stack),
        meshes=meshes,
        queues=stores.queues,
        queue_board=QueueBoard(stores.queues, meshes, clock, sql, max_attempts=settings.max_attempts),
        journal=stores.journal,
        branches=stores.branches,
        snapshots=stores.snapshots,
        timeline=stores.timeline,
        trace_threads=_threads("traces", _TRACE_THREADS, stack),
    )


def _jobs(common: CommonParts, stores: Stores, signer: Signer, stack: AsyncExitStack) -> JobParts:
    polls = JobPolls(stores.jobs, common.sql)
    polls.start()
    stack.push_async_callback(polls.stop)
    rewards = RewardProcesses()
    stack.push_async_callback(rewards.close)
    return JobParts(
        store=stores.jobs,
        outlooks=stores.job_outlooks,
        sealer=Sealer(signer),
        polls=polls,
        bell=_start_job_bell(common.settings, stores, stack),
        hook_key_of=partial(hook_key, signer),
        rewards=rewards,
    )


def _threads(name: str, size: int, stack: AsyncExitStack) -> Threads:
    threads = Threads(name, size)
    stack.push_async_callback(asyncio.to_thread, threads.stop)
    return threads


def _start_listener(settings: Settings, stack: AsyncExitStack, *callbacks: Callable[[list[str]], None]) -> None:
    def tell(request_ids: list[str]) -> None:
        for callback in callbacks:
            callback(request_ids)

    listener = ChannelListener(settings.redis_url.get_secret_value(), COMPLETIONS, tell)
    listener.start()
    stack.push_async_callback(asyncio.to_thread, listener.stop)


def _start_token_feeds(settings: Settings, stack: AsyncExitStack) -> TokenFeeds:
    feeds = TokenFeeds()
    listener = ChannelListener(settings.redis_url.get_secret_value(), token_channel(feeds.id), feeds.hear)
    listener.start()
    stack.push_async_callback(asyncio.to_thread, listener.stop)
    return feeds


def _start_nudger(settings: Settings, stack: AsyncExitStack) -> Nudger:
    nudger = Nudger(make_app(settings), settings.redis_url.get_secret_value())
    nudger.start()
    stack.push_async_callback(asyncio.to_thread, nudger.stop)
    return nudger


def _start_job_bell(settings: Settings, stores: Stores, stack: AsyncExitStack) -> JobBell:
    redis_url = settings.redis_url.get_secret_value()
    bell = JobBell(JobDispatcher(make_app(settings), stores.waiting_jobs, redis_url))
    bell.start()
    stack.push_async_callback(asyncio.to_thread, bell.stop)
    return bell


def prepare_database(settings: Settings) -> None:
    """Bring the database to the current schema, creating the embedded one. Blocks.

    Raises:
        StorageUnavailable: It does not answer.
    """
    if not settings.database_url:
        make_private_home(settings.home)
        make_way(settings.home)
    schema.upgrade(settings.resolved_database_url)
    if not settings.database_url:
        keep_room(settings.home, low_bytes=settings.disk_low_bytes)
