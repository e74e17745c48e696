"""Housekeeping: a Celery worker with an embedded beat that sweeps the journal and nudges what waits."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from celery import Celery

from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.process.crash import crash_point
from twinkle.core.process.logs import configure_logging
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.placement import spread
from twinkle.scheduler.retention import Retention
from twinkle.storage.blobs import BlobStore
from twinkle.storage.sampling.sampling_sessions import Patience
from twinkle.storage.schema import upgrade
from twinkle.storage.stores import Stores
from twinkle.storage.upkeep.frozen import FrozenClients
from twinkle.tasks.app import HOUSEKEEPING_QUEUE, make_app
from twinkle.tasks.jobs import JobDispatcher
from twinkle.tasks.nudge import Nudger
from twinkle.tasks.pushing import CheckpointPusher
from twinkle.tasks.surroundings import check_surroundings

_NUDGE_EVERY_S = 1.0
_SWEEP_EVERY_S = 5.0
_EXPIRE_EVERY_S = 60.0
_MAX_BATCHES = 200

_log = structlog.get_logger()


class Housekeeping:
    """The sweeps, bound to their stores."""

    def __init__(
        self,
        *,
        settings: Settings,
        stores: Stores,
        blobs: BlobStore,
        nudger: Nudger,
        publisher: CompletionPublisher,
        jobs: JobDispatcher,
        pusher: CheckpointPusher,
    ) -> None:
        self._settings = settings
        self._stores = stores
        self._retention = Retention(
            keep_s=settings.retention_s,
            every_ops=settings.keep_snapshot_every_ops,
            max_snapshots=settings.max_snapshots,
        )
        self._blobs = blobs
        self._nudger = nudger
        self._publisher = publisher
        self._jobs = jobs
        self._pusher = pusher

    def nudge(self) -> None:
        """Wake every mesh that has work waiting: the safety net behind each request's own nudge."""
        for mesh in self._stores.journal.ready_meshes():
            crash_point("housekeeping.nudging")
            self._nudger.ring(mesh)

    def dispatch_jobs(self) -> None:
        """Hand out the jobs that may begin: submitted, to be retried, or left behind by a runner that is gone."""
        crash_point("housekeeping.dispatching")
        self._jobs.dispatch()

    def push_checkpoints(self) -> None:
        """Submit an export for each new checkpoint that is to be pushed by itself."""
        self._pusher.push()

    def sweep(self) -> None:
        """End what has waited too long: gaps in a sequence, operations past their deadline."""
        _each(self._close_gaps, self.move, self._expire_overdue)

    def _close_gaps(self) -> None:
        self._publish(self._stores.upkeep.close_gaps(older_than_s=self._settings.gap_timeout_s))
        crash_point("housekeeping.gaps_closed")

    def _expire_overdue(self) -> None:
        self._publish(
            self._stores.upkeep.expire_overdue(
                deadline_s=self._settings.operation_deadline_s, deadline_s_of=self._settings.operation_deadline_s_of
            )
        )

    def _publish(self, ended: list[str]) -> None:
        if ended:
            _log.warning("housekeeping.ended", count=len(ended), first=ended[0])
            self._publisher.publish(ended)

    def move(self) -> None:
        """Send what is on meshes that are drained to others, and let go what has no worker that would."""
        meshes = self._stores.meshes.all()
        for mesh in meshes:
            if mesh.is_draining:
                for name, lanes in spread(self._stores.moves.staying(mesh.name), mesh, meshes).items():
                    if self._stores.moves.send(lanes, name):
                        _log.info("housekeeping.sent", mesh=mesh.name, to=name, count=len(lanes))
        num_moved = self._stores.moves.finish_abandoned()
        if num_moved:
            _log.info("housekeeping.moved", count=num_moved)

    def expire(self) -> None:
        """Forget results, jobs, checkpoints, files, and what runs keep to be rebuilt from, when their time has come.

        Blobs are deleted a while after nothing refers to them any more: whoever was reading one has ended by then.
        """
        settings, stores = self._settings, self._stores
        _each(
            stores.job_keeping.release,
            partial(stores.job_keeping.end_paused, older_than_s=settings.job_pause_ttl_s),
            partial(stores.job_keeping.forget, older_than_s=settings.job_retention_s),
            stores.kept_payloads.count,
            partial(stores.upkeep.expire_results, older_than_s=settings.result_ttl_s),
            stores.upkeep.expire_checkpoints,
            stores.upkeep.expire_access_tokens,
            partial(stores.sessions.forget, older_than_s=settings.session_retention_s),
            stores.files.expire,
            stores.uploads.expire,
            partial(stores.processors.expire, idle_s=settings.processor_idle_s),
            partial(stores.prepared_rows.expire, idle_s=settings.prepared_data_idle_s),
            self._end_weights,
            self._prune,
            self.forget,
            self._delete_blobs,
        )

    def _end_weights(self) -> None:
        patience = Patience(
            idle_s=self._settings.ephemeral_idle_s,
            silent_s=self._settings.session_timeout_s + self._settings.ephemeral_grace_s,
        )
        num_ended = self._stores.sampling_sessions.end_unreachable(patience)
        if num_ended:
            _log.info("housekeeping.ephemeral_ended", count=num_ended)

    def _prune(self) -> None:
        runs = self._stores.snapshots.runs_to_prune(older_than_s=self._settings.retention_s)
        _each(*(partial(self._stores.snapshots.prune, run, self._retention.choose) for run in runs))

    def _delete_blobs(self) -> None:
        num_deleted = 0
        for _ in range(_MAX_BATCHES):
            crash_point("housekeeping.deleting")
            deleted = self._stores.waste.delete(self._blobs, older_than_s=self._settings.download_url_ttl_s)
            num_deleted += deleted
            if deleted == 0:
                break
        if num_deleted:
            _log.info("housekeeping.deleted", blobs=num_deleted)

    def forget(self) -> None:
        """Delete the rows of what ended long ago: operations, whole runs, what was added up of them, the audit log."""
        crash_point("housekeeping.forgetting")
        num_forgotten = self._stores.forgetting.forget_operations(
            older_than_s=self._settings.operation_retention_s, max_batches=_MAX_BATCHES
        )
        num_lanes = self._stores.gone_lanes.forget(older_than_s=self._settings.run_retention_s)
        self._stores.forgetting.forget_usage(older_than_s=self._settings.usage_retention_s)
        num_entries = self._stores.audit.forget(older_than_s=self._settings.audit_retention_s)
        if num_forgotten or num_lanes or num_entries:
            _log.info("housekeeping.forgotten", operations=num_forgotten, lanes=num_lanes, audit_entries=num_entries)


def _each(*sweeps: Callable[[], object]) -> None:
    """Run them in turn, each whatever became of those before it: what one stumbles over must not keep all others.

    Raises:
        StorageUnavailable: The database or the object store is away, and the rest was left for the next time.
        ExceptionGroup: What went wrong in some; the last of it may be that the rest was left, as above.
    """
    errors: list[Exception] = []
    for sweep in sweeps:
        try:
            sweep()
        except Exception as error:  # noqa: BLE001 - raised below, with those of the others
            # One that has sweeps of its own raises what was wrong in each of them.
            errors += error.exceptions if isinstance(error, ExceptionGroup) else [error]
            if isinstance(errors[-1], StorageUnavailable):
                break
    if len(errors) == 1 and isinstance(errors[0], StorageUnavailable):
        raise errors[0]
    if errors:
        raise ExceptionGroup("sweeps of housekeeping failed; they are tried again at the next beat", errors)


def register(app: Celery, housekeeping: Housekeeping) -> None:
    """Put the sweeps on the application's beat. They are no events: one a second would crowd out the operations."""
    for name, every_s, sweep in (
        ("housekeeping.nudge", _NUDGE_EVERY_S, housekeeping.nudge),
        ("housekeeping.jobs", _NUDGE_EVERY_S, housekeeping.dispatch_jobs),
        ("housekeeping.pushes", _SWEEP_EVERY_S, housekeeping.push_checkpoints),
        ("housekeeping.sweep", _SWEEP_EVERY_S, housekeeping.sweep),
        ("housekeeping.expire", _EXPIRE_EVERY_S, housekeeping.expire),
    ):
        task = app.task(name=name, shared=False, ignore_result=True, send_events=False, throws=(StorageUnavailable,))
        task(_plain(sweep))
        options: dict[str, Any] = {"queue": HOUSEKEEPING_QUEUE, "expires": every_s * 2}
        app.conf.beat_schedule[name] = {"task": name, "schedule": every_s, "options": options}


def _plain(sweep: Callable[[], None]) -> Callable[[], None]:
    """A plain function: Celery counts a bound method's ``self`` among the arguments a message must bring."""

    def run() -> None:
        sweep()

    return run


def run_housekeeping(settings: Settings) -> int:
    """Sweep until SIGTERM; the exit status."""
    configure_logging(settings.log_level, settings.log_json)
    blobs = check_surroundings(settings)
    stores = Stores.at(settings.resolved_database_url, SystemClock(), limits=settings.tenant_limits)
    upgrade(stores.database.url)
    app = make_app(settings)
    redis_url = settings.redis_url.get_secret_value()
    nudger = Nudger(app, redis_url)
    nudger.start()
    frozen = FrozenClients(stores.database.url)
    frozen.start()
    housekeeping = Housekeeping(
        settings=settings,
        stores=stores,
        blobs=blobs,
        nudger=nudger,
        publisher=CompletionPublisher(redis_url),
        jobs=JobDispatcher(app, stores.waiting_jobs, redis_url),
        pusher=CheckpointPusher(stores.pushes, stores.jobs),
    )
    register(app, housekeeping)
    worker = app.Worker(
        hostname=f"housekeeping@{socket.gethostname()}",
        pool="threads",
        concurrency=1,
        queues=[HOUSEKEEPING_QUEUE],
        loglevel=settings.log_level,
        beat=True,
        scheduler="celery.beat:Scheduler",
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    frozen.stop()
    nudger.stop()
    return int(worker.exitcode or 0)
