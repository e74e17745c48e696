"""Running a job: claim it, let its plan run, keep the lease meanwhile, and write down how it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog
from pydantic import ValidationError

from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidInput, StorageUnavailable, TwinkleError
from twinkle.core.job import (
    GROUPS,
    Job,
    JobCancelled,
    JobClaim,
    JobEvent,
    JobFailed,
    JobFailure,
    JobLost,
    JobPaused,
    JobRests,
    JobSignals,
    JobState,
    JsonObject,
)
from twinkle.core.lease import ProcessIdentity
from twinkle.core.process.crash import crash_point
from twinkle.jobs.context import ContextParts, JobContext
from twinkle.jobs.door import Door
from twinkle.jobs.estimate import estimate_of
from twinkle.jobs.files import JobFiles
from twinkle.jobs.plans import Plan, PlanClasses, ReckoningPlan
from twinkle.jobs.tools import Tools
from twinkle.storage.jobs.running import RunningJobs
from twinkle.storage.jobs.waiting import WaitingJobs
from twinkle.storage.journal.speeds import Speeds
from twinkle.wire.bodies.base import invalid_input
from twinkle.wire.bodies.jobs_base import JobSpec
from twinkle.wire.references import resolved

T = TypeVar("T")

_SQL_THREADS = 4
_RETRY_S = 1.0
_LAST_TRIES = 3
"""How often a runner that is to stop asks a journal that is away."""
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0

_log = structlog.get_logger()


def pause_before(num_failures: int) -> float:
    """How long a job waits before its next attempt: 10 s after the first failure, then twice as long each time."""
    return min(_FIRST_PAUSE_S * 2.0 ** (num_failures - 1), _LONGEST_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """What a runner works with."""

    running: RunningJobs
    waiting: WaitingJobs
    speeds: Speeds
    clock: Clock
    plans: PlanClasses
    open_door: Callable[[Job], Door]
    open_files: Callable[[Job, Door], JobFiles]
    tools: Tools
    owner: ProcessIdentity
    lease_s: float
    tell: Callable[[Sequence[str]], None]
    """Says that something happened in these jobs, to whoever follows them; may block for a while, never raises."""
    pause_s: Callable[[int], float] = pause_before


class AttemptWatcher(Protocol):
    """Is told of an attempt by whoever runs it. It may block for a while, and never raises."""

    def began(self, job: Job) -> None:
        """It was claimed."""
        ...

    def left(self, job: Job, runtime_s: float) -> None:
        """It ended, or its job was given back."""
        ...


class JobRunner:
    """Runs jobs, any number at once, on one event loop."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._threads = ThreadPoolExecutor(_SQL_THREADS, thread_name_prefix="jobs-sql")
        self._plans_under_way: set[asyncio.Task[JsonObject]] = set()
        self._num_runs = 0
        self._all_ended = asyncio.Condition()
        self._is_stopping = False

    async def run(self, job_id: str, *, watcher: AttemptWatcher | None = None) -> Job | None:
        """Run a job until it ends, pauses, or its attempt fails; how it stands then, ``None`` if it was not to be had.

        Also ``None``: it was lost to another runner meanwhile, or this one was to stop while the journal was away: then
        the lease ends by itself.
        """
        if self._is_stopping:
            return None
        self._num_runs += 1
        try:
            return await self._claim_and_run(job_id, watcher)
        except StorageUnavailable as error:
            _log.warning("job.left_behind", job=job_id, error=error.message, next="another runner goes on")
            return None
        finally:
            async with self._all_ended:
                self._num_runs -= 1
                self._all_ended.notify_all()

    async def _claim_and_run(self, job_id: str, watcher: AttemptWatcher | None) -> Job | None:
        parts = self._parts
        claim = await self._sql(partial(parts.running.claim, job_id, parts.owner, lease_s=parts.lease_s))
        await self._sql(parts.waiting.settle)
        if claim is None:
            return None
        crash_point("job.claimed")
        await self._block(partial(parts.tell, [job_id]))
        with structlog.contextvars.bound_contextvars(job=job_id, tenant=claim.job.tenant, attempt=claim.job.attempt):
            _log.info("job.begins", kind=claim.job.kind.value, epoch=claim.epoch)
            began_at = parts.clock.monotonic()
            if watcher is not None:
                await self._block(partial(watcher.began, claim.job))
            try:
                ended = await self._run(claim)
            except JobLost as error:
                _log.warning("job.lost", error=error.message, next="whoever holds it goes on")
                return None
            _log.info("job.leaves", state=ended.state.value, phase=ended.phase)
            if watcher is not None:
                await self._block(partial(watcher.left, ended, parts.clock.monotonic() - began_at))
        await self._sql(parts.waiting.settle)
        return ended

    async def stop(self) -> None:
        """Give all jobs back at once, and take no more. Returns when the journal has them, or is away for seconds."""
        self._is_stopping = True
        for task in list(self._plans_under_way):
            task.cancel()
        async with self._all_ended:
            await self._all_ended.wait_for(lambda: self._num_runs == 0)

    async def close(self) -> None:
        """Close what blocks. Nothing may run any more."""
        await asyncio.to_thread(self._threads.shutdown)

    async def _run(self, claim: JobClaim) -> Job:
        work = asyncio.create_task(self._work(claim))
        self._plans_under_way.add(work)
        beats = asyncio.create_task(self._beat(claim, work))
        if self._is_stopping:
            # It was claimed while the others were given back.
            work.cancel()
        try:
            end = await self._outcome(claim, work, beats)
            ended = await self._sql(end)
            crash_point("job.ended")
            await self._block(partial(self._parts.tell, [claim.job.id]))
            return ended
        finally:
            self._plans_under_way.discard(work)
            beats.cancel()
            with suppress(asyncio.CancelledError):
                await beats

    async def _outcome(
        self, claim: JobClaim, work: asyncio.Task[JsonObject], beats: asyncio.Task[None]
    ) -> Callable[[], Job]:
        """Let the plan run; what is to be written of how it ended.

        Raises:
            JobLost: Nothing is: another runner holds the job.
        """
        running, now = self._parts.running, self._parts.clock.now
        try:
            result = await work
            crash_point("job.worked")
            return partial(running.finish, claim, JobState.SUCCEEDED, result=result)
        except JobPaused:
            return partial(running.give_back, claim, JobState.PAUSED, reason="paused")
        except JobRests as rest:
            not_before = now() + rest.seconds
            return partial(running.give_back, claim, JobState.QUEUED, not_before=not_before, reason=str(rest))
        except JobCancelled as error:
            return partial(running.finish, claim, JobState.CANCELLED, result=error.result)
        except JobLost:
            raise
        except asyncio.CancelledError:
            if self._is_stopping:
                return partial(running.give_back, claim, JobState.QUEUED, reason="its runner was asked to stop")
            if not beats.done():
                # Whoever waits for the attempt was cancelled; the lease ends, and another runner goes on.
                raise
            raise JobLost(f"job {claim.job.id} was taken up by another runner") from None
        except Exception as error:  # noqa: BLE001 - the border: whatever a plan meets ends its attempt, never the runner
            failure = failure_of(error)
            _log.warning("job.attempt_failed", code=failure.code, error=failure.message, exc_info=error)
            return partial(running.fail_attempt, claim, failure, pause_s=self._parts.pause_s)

    async def _work(self, claim: JobClaim) -> JsonObject:
        parts, job = self._parts, claim.job
        plan_class = parts.plans.get(job.kind)
        if plan_class is None:
            raise JobFailed("unknown_kind", f"this service has no plan for jobs of kind {job.kind.value!r}")
        try:
            values = await self._resolved(job)
            spec = plan_class.spec_class.model_validate_json(json.dumps(values))
        except ValidationError as error:
            refused = invalid_input(error)
            raise JobFailed("invalid_spec", refused.message, field=refused.field) from error
        if isinstance(values.get("seed"), int):
            # Of a member of a sweep or a flow its own: the group's is for those that say none.
            job = replace(job, seed=values["seed"])
        door = parts.open_door(job)
        try:
            context = JobContext(
                job,
                spec,
                claim.saved,
                ContextParts(
                    door=door,
                    files=parts.open_files(job, door),
                    tools=parts.tools,
                    recorder=_LeasedRecorder(self, claim),
                    clock=parts.clock,
                ),
            )
            if isinstance(spec, JobSpec) and spec.dry_run and job.kind not in GROUPS:
                return await self._estimate(plan_class(), context)
            return await plan_class().run(context)
        finally:
            await door.close()

    async def _estimate(self, plan: Plan, context: JobContext[Any]) -> JsonObject:
        """What the job would take, instead of it."""
        job = context.job
        if not isinstance(plan, ReckoningPlan):
            raise JobFailed("no_dry_run", f"jobs of kind {job.kind.value!r} have no dry run", field="dry_run")
        work = await plan.reckon(context)
        facts = [
            await self._sql(partial(self._parts.speeds.of_model, model, job.tenant))
            for model in (work.base_model, *(other.base_model for other in work.elsewhere))
        ]
        return estimate_of(work, facts[0], elsewhere=facts[1:])

    async def _resolved(self, job: Job) -> JsonObject:
        """The job's spec with what it refers to of the jobs that it came after."""
        if job.kind in GROUPS or "${" not in json.dumps(job.spec):
            return job.spec
        try:
            return resolved(job.spec, await self._sql(partial(self._parts.running.results_of_needs, job.id)))
        except InvalidInput as error:
            raise JobFailed("invalid_spec", error.message, field=error.field) from error

    async def _beat(self, claim: JobClaim, work: asyncio.Task[JsonObject]) -> None:
        while True:
            await asyncio.sleep(claim.lease_s / 3)
            try:
                await self._sql(partial(self._parts.running.beat, claim))
            except JobLost:
                work.cancel()
                return
            except Exception as error:  # noqa: BLE001 - the border: without this loop the lease would end in silence
                _log.error("job.not_renewed", error=str(error), next="the next beat", exc_info=error)

    async def record(
        self,
        claim: JobClaim,
        *,
        phase: str | None,
        progress: JsonObject | None,
        saved: JsonObject | None,
        events: Sequence[JobEvent],
    ) -> JobSignals:
        """For a plan's context: one fenced write."""
        crash_point("job.saving")
        write = partial(self._parts.running.record, claim, phase=phase, progress=progress, saved=saved, events=events)
        signals = await self._sql(write)
        crash_point("job.saved")
        if events:
            await self._block(partial(self._parts.tell, [claim.job.id]))
        return signals

    async def _sql(self, ask: Callable[[], T]) -> T:
        """Ask the journal, however long it is away: every write is fenced, so late is as good as never.

        Raises:
            StorageUnavailable: It is away, and this runner is to stop.
        """
        tries_left = _LAST_TRIES
        while True:
            try:
                return await self._block(ask)
            except StorageUnavailable as error:
                tries_left -= self._is_stopping
                if not tries_left:
                    raise
                _log.warning("job.waits_for_database", error=error.message, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def _block(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class _LeasedRecorder:
    """What a context writes through: the runner, under one claim."""

    def __init__(self, runner: JobRunner, claim: JobClaim) -> None:
        self._runner = runner
        self._claim = claim

    async def record(
        self,
        *,
        phase: str | None = None,
        progress: JsonObject | None = None,
        saved: JsonObject | None = None,
        events: Sequence[JobEvent] = (),
    ) -> JobSignals:
        """See :class:`twinkle.jobs.context.Recorder`."""
        return await self._runner.record(self._claim, phase=phase, progress=progress, saved=saved, events=events)


def failure_of(error: Exception) -> JobFailure:
    """What an attempt that raised this is told to have failed of, and whether another one may do better."""
    if isinstance(error, JobFailed):
        return error.failure
    if isinstance(error, TwinkleError):
        field = error.context.get("field")
        return JobFailure(
            code=error.code,
            message=error.message,
            is_transient=error.retryable,
            field=field if isinstance(field, str) else None,
        )
    return JobFailure(code="internal", message=f"{type(error).__name__} in its plan", is_transient=True)
