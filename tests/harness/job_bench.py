"""Jobs in a bare journal: submitted, begun and ended by hand, without a runner."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from harness.journal import Bench, identity
from twinkle.core.ids import new_id
from twinkle.core.job import Job, JobClaim, JobFailure, JobKind, JobState, JsonObject, NewJob
from twinkle.wire.job_groups import expanded

SFT: JsonObject = {"model": "base", "data": "file-1"}


class JobBench:
    """Short words for what tests do with jobs."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.jobs = bench.stores.jobs
        self.running = bench.stores.running_jobs
        self.waiting = bench.stores.waiting_jobs

    def new(
        self, kind: JobKind = JobKind.SUPERVISED, spec: JsonObject | None = None, *, tenant: str = "t0", **more: Any
    ) -> NewJob:
        """A job as a route would make it of a request."""
        spec = SFT if spec is None else spec
        digest = sha256(repr((kind, spec)).encode()).hexdigest()
        return NewJob(id=more.pop("id", new_id()), tenant=tenant, kind=kind, spec=spec, digest=digest, **more)

    def submit(self, *news: NewJob) -> list[Job]:
        """Take jobs on, with all that they are made of; what comes next is younger."""
        self.bench.clock.move(1.0)
        return self.jobs.create_groups([expanded(new) for new in news])

    def sweep(self, num: int, *, tenant: str = "t0", at_once: int | None = None, **more: Any) -> Job:
        """A sweep over so many seeds."""
        spec = {"template": {"kind": "sft", "spec": SFT}, "parameters": {"seed": list(range(num))}}
        spec |= {"at_once": at_once} if at_once else {}
        return self.submit(self.new(JobKind.SWEEP, spec, tenant=tenant, **more))[0]

    def flow(self, *, tenant: str = "t0", **jobs: JsonObject) -> Job:
        """A flow of these jobs, each of kind ``sft`` unless it says otherwise."""
        spec = {"jobs": {name: {"kind": "sft", "spec": SFT, **job} for name, job in jobs.items()}}
        return self.submit(self.new(JobKind.FLOW, spec, tenant=tenant))[0]

    def ready(self, limit: int = 100) -> list[str]:
        """The ids of the jobs that are handed out now, in order."""
        self.waiting.settle()
        return [job.id for job in self.waiting.take_ready(limit=limit, again_after_s=60.0)]

    def begin(self, job_id: str) -> JobClaim:
        """Take a job up."""
        claim = self.running.claim(job_id, identity("runner"), lease_s=1000.0)
        assert claim is not None, f"{job_id} is not to be had"
        return claim

    def end(self, claim: JobClaim, state: JobState = JobState.SUCCEEDED, result: JsonObject | None = None) -> None:
        """End it."""
        failure = JobFailure(code="broken", message="it broke") if state is JobState.FAILED else None
        self.running.finish(claim, state, result=result, failure=failure)

    def run(self, job_id: str, state: JobState = JobState.SUCCEEDED, result: JsonObject | None = None) -> None:
        """Take it up and end it."""
        self.end(self.begin(job_id), state, result)

    def state(self, job_id: str, tenant: str = "t0") -> JobState:
        """Where it is."""
        return self.jobs.find(job_id, tenant).state
