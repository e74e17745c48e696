"""Everything that lives in the process that owns the device, built from the settings."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.lease import ProcessIdentity
from twinkle.core.mesh import WHOLE_MODEL
from twinkle.core.process.lazy import without_collector
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import ChannelListener, CompletionPublisher
from twinkle.scheduler.token_stream import TokenPublisher
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.disks import Disks
from twinkle.storage.schema import upgrade_patiently
from twinkle.storage.stores import Stores
from twinkle.tasks.nudge import bell_key, ring_channel, send_pump
from twinkle.workers.assembly import Surroundings, WorkerOptions, WorkerParts
from twinkle.workers.clerk import OneThread
from twinkle.workers.engine import Engine
from twinkle.workers.engines.null_engine import NullEngine
from twinkle.workers.engines.threads import ThreadRecord, thread_limit
from twinkle.workers.report import OperationReporter
from twinkle.workers.sampling.sampling import CacheGroups
from twinkle.workers.starts import EXIT_FAILED_START

_PUMP_BUDGET_S = 1.0
# Longer than a training loop needs from one answer to its next request.
_AWAKE_S = 0.05
_SOCKET_TIMEOUT_S = 5.0

_log = structlog.get_logger()


@dataclass
class MeshProcess:
    """One mesh's device, worker and lease. Started once in the pool's child."""

    settings: Settings
    app: Celery
    hostname: str

    def __post_init__(self) -> None:
        settings = self.settings
        if settings.serves == WHOLE_MODEL:
            # Its device holds one copy beside the model as it was loaded.
            settings = settings.model_copy(update={"max_resident_adapters": 1})
        clock = SystemClock()
        stores = Stores.at(settings.resolved_database_url, clock, limits=settings.tenant_limits)
        upgrade_patiently(stores.database.url, clock)
        thread_record = self._thread_record = ThreadRecord(stores.meshes, settings)
        engine = self._engine = build_engine(thread_record.settings(limit=_thread_limit(settings)))
        redis_url = settings.redis_url.get_secret_value()
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=_SOCKET_TIMEOUT_S)
        self._tokens = TokenPublisher(redis_url)
        self._reporter = OperationReporter(self.app, self.hostname, name_of_tenant=stores.tenants.name_of)
        around = Surroundings(
            stores=stores,
            journal=stores.journal,
            blobs=open_blob_store(settings.resolved_object_store),
            disks=Disks.of(settings, clock),
            clock=clock,
            identity=ProcessIdentity.current(),
            capabilities=thread_record.written_into(engine.capabilities).model_copy(
                update={
                    "adapter_slots": settings.max_resident_adapters,
                    "serves": settings.serves if settings.serves != "everything" else engine.capabilities.serves,
                }
            ),
            publisher=CompletionPublisher(redis_url),
            token_publisher=self._tokens,
            reporter=self._reporter,
            cache_groups=CacheGroups(settings.prompt_cache_groups, stores.tenants.name_of),
            threads=ThreadPoolExecutor(settings.transfer_threads, thread_name_prefix="transfers"),
            clerk=OneThread("clerk"),
            teller=ThreadPoolExecutor(1, thread_name_prefix="teller"),
        )
        parts = WorkerParts(engine, around, WorkerOptions.of(settings))
        self._worker, self._keeper, self._transfers = parts.worker, parts.keeper, parts.transfers
        self._stopping = threading.Event()
        self._rung = threading.Event()
        self._bell = ChannelListener(redis_url, ring_channel(settings.mesh), self._hear)
        self._sweeper = threading.Thread(target=self._sweep_forever, name="sweep", daemon=True)

    def start(self) -> None:
        """Begin to hold the lease and to sweep."""
        try:
            # A predecessor that died awake has left it up.
            self._redis.delete(bell_key(self.settings.mesh))
        except redis.RedisError as error:
            _log.warning("worker.broker_unavailable", error=str(error), next="the sweep goes on")
        self._reporter.start()
        self._tokens.start()
        self._bell.start()
        self._keeper.start()
        self._sweeper.start()

    def pump(self) -> None:
        """Answer a nudge, then stay awake for a moment: whoever rings meanwhile needs no Celery message.

        The bell stays up all the while and comes down before the last look. A pump that has worked for its time hands
        over to the next one, so that Celery can end the process in between.
        """
        ends_at = time.monotonic() + _PUMP_BUDGET_S
        try:
            while not self._stopping.is_set() and time.monotonic() < ends_at:
                self._rung.clear()
                if not self._worker.drain(budget_s=_PUMP_BUDGET_S) and not self._rung.wait(_AWAKE_S):
                    break
            self._redis.delete(bell_key(self.settings.mesh))
            if self._worker.drain(budget_s=_PUMP_BUDGET_S):
                send_pump(self.app, self._redis, self.settings.mesh)
        except (redis.RedisError, OperationalError) as error:
            _log.warning("pump.broker_unavailable", error=str(error), next="the sweep goes on")

    def stop(self) -> None:
        """Finish the batch at hand, give back what is under way, snapshot, release the mesh."""
        self._stopping.set()
        self._rung.set()
        self._worker.close()
        self._tokens.stop()
        self._bell.stop()
        # It may be about to take the lease again, which must not happen after the release.
        self._sweeper.join()
        self._transfers.close()
        self._keeper.stop()
        self._engine.close()
        _log.info("worker.stopped", mesh=self.settings.mesh)

    def _hear(self, _: list[str]) -> None:
        self._rung.set()
        self._worker.ring()

    def _sweep_forever(self) -> None:
        """Work without being nudged: a lost nudge costs at most one sweep, a broker that is away costs nothing else."""
        while not self._stopping.is_set():
            try:
                if self._keeper.current() is not None or self._acquire():
                    while self._worker.drain(budget_s=_PUMP_BUDGET_S):
                        pass
            except StorageUnavailable as error:
                _log.warning("sweep.storage_unavailable", error=error.message)
            except Exception as error:  # noqa: BLE001 - without the sweep nobody would ever take the lease again
                _log.error("sweep.failed", error=str(error), next="the next sweep goes on", exc_info=error)
            self._stopping.wait(self.settings.sweep_s)

    def _acquire(self) -> bool:
        """Take the mesh if it is free; end this process if its bits might not be those of the worker before it."""
        if self._thread_record.is_outdated:
            _log.warning("worker.threads_outdated", next="another child starts, with the number that is kept")
            os._exit(EXIT_FAILED_START)
        return self._keeper.try_acquire() is not None


def _thread_limit(settings: Settings) -> int:
    """How many threads each rank may have: on Ray, where it is not this machine's cores that count, its CPUs."""
    return thread_limit(settings.ranks) if settings.ranks_on == "machine" else max(1, int(settings.rank_cpus))


def build_engine(settings: Settings) -> Engine[Any]:
    """The engine that the settings name. One of several ranks is to be built by the main thread."""
    on_ray = settings.ranks_on == "ray"
    if settings.shard == "fsdp" and settings.ranks == 1:
        raise ConfigError("TWINKLE_SHARD: fsdp spreads the base model over ranks; set TWINKLE_RANKS to 2 or more")
    if (settings.ranks > 1 or on_ray) and settings.sampler == "vllm":
        raise ConfigError("TWINKLE_SAMPLER: vllm samples on a mesh of one rank only; set TWINKLE_RANKS to 1")
    if settings.serves == WHOLE_MODEL:
        _check_whole_model(settings)
    if settings.engine == "null":
        if settings.ranks > 1 or on_ray:
            raise ConfigError("TWINKLE_RANKS: the null engine has one rank, here; use TWINKLE_ENGINE=transformers")
        return NullEngine(base_model=settings.resolved_model_name or "null", max_rank=settings.max_rank)
    if settings.engine == "megatron":
        _check_megatron(settings)
    elif settings.engine != "transformers":
        raise ConfigError(f"TWINKLE_ENGINE: {settings.engine!r} is unknown; use transformers, megatron or null")
    elif settings.tensor_parallel * settings.pipeline_parallel * settings.expert_parallel > 1:
        raise ConfigError(
            "TWINKLE_TENSOR_PARALLEL, TWINKLE_PIPELINE_PARALLEL, TWINKLE_EXPERT_PARALLEL: are for"
            " TWINKLE_ENGINE=megatron; TWINKLE_SHARD=fsdp spreads the layers of transformers"
        )
    # They import torch, which takes seconds and which the null engine does without.
    with without_collector():
        from twinkle.workers.engines.transformers_engine import TransformersEngine  # noqa: PLC0415
        from twinkle.workers.ranks.engine import RankedEngine  # noqa: PLC0415

    if settings.ranks > 1 or on_ray:
        return RankedEngine.start(settings)
    return TransformersEngine.from_settings(settings)


def _check_whole_model(settings: Settings) -> None:
    if settings.ranks > 1 or settings.ranks_on == "ray":
        raise ConfigError("TWINKLE_RANKS: a mesh that trains the whole model has one rank; set it to 1")
    if settings.engine == "megatron" or settings.sampler == "vllm" or settings.dtype == "bfloat16":
        raise ConfigError(
            "TWINKLE_SERVES: whole-model trains float32 weights by transformers and does not sample; leave out"
            " TWINKLE_ENGINE, TWINKLE_SAMPLER and TWINKLE_DTYPE, and sample on another mesh"
        )


def _check_megatron(settings: Settings) -> None:
    parallel = settings.tensor_parallel * settings.pipeline_parallel * settings.expert_parallel
    if parallel != settings.ranks:
        raise ConfigError(
            f"TWINKLE_RANKS: is {settings.ranks}, but TWINKLE_TENSOR_PARALLEL ({settings.tensor_parallel}) times"
            f" TWINKLE_PIPELINE_PARALLEL ({settings.pipeline_parallel}) times TWINKLE_EXPERT_PARALLEL"
            f" ({settings.expert_parallel}) is {parallel}; make them equal"
        )
    if settings.shard == "fsdp":
        raise ConfigError("TWINKLE_SHARD: fsdp is for transformers; leave it out with TWINKLE_ENGINE=megatron")
    if settings.sampler == "vllm" or settings.serves == "samples":
        raise ConfigError(
            "TWINKLE_SERVES: a mesh by megatron trains and does not sample; give the model another mesh with"
            " TWINKLE_ENGINE=transformers and TWINKLE_SERVES=samples"
        )
