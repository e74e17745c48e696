"""Jobs in a furnished journal, and short words for what tests do with them."""

from __future__ import annotations

from typing import Any

from harness.journal import Bench, identity
from twinkle.core.job import Dependency, Job, JobClaim, JobFailure, JobKind, JobState, NewJob

LEASE_S = 30.0
PAUSE_S = 10.0
PASSING = JobFailure(code="overloaded", message="too much waits", is_transient=True)
LASTING = JobFailure(code="invalid_data", message="line 3 is no JSON", field="training_file")


def new_job(name: str, *, tenant: str = "t0", needs: dict[str, str] | None = None, **more: Any) -> NewJob:
    """A job whose id is its name; what it needs by condition."""
    after = tuple(Dependency(job=job, condition=condition) for job, condition in (needs or {}).items())  # type: ignore[arg-type]
    values: dict[str, Any] = {"kind": JobKind.OPS, "spec": {"name": name}, "digest": f"digest of {name}", **more}
    return NewJob(id=name, tenant=tenant, after=after, **values)


class JobBench:
    """One journal's jobs."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.clock = bench.clock
        self.jobs = bench.stores.jobs
        self.running = bench.stores.running_jobs
        self.waiting = bench.stores.waiting_jobs
        self.keeping = bench.stores.job_keeping

    def submit(self, name: str, **more: Any) -> Job:
        return self.jobs.create(new_job(name, **more))

    def claim(self, job: str, runner: str = "a") -> JobClaim:
        claim = self.running.claim(job, identity(runner), lease_s=LEASE_S)
        assert claim is not None
        return claim

    def is_free(self, job: str) -> bool:
        return self.running.claim(job, identity("whoever asks"), lease_s=LEASE_S) is not None

    def finish(self, job: str, state: JobState = JobState.SUCCEEDED) -> Job:
        ended = self.running.finish(self.claim(job), state)
        self.waiting.settle()
        return ended

    def fail(self, claim: JobClaim, failure: JobFailure = PASSING) -> Job:
        return self.running.fail_attempt(claim, failure, pause_s=lambda num_failures: PAUSE_S * num_failures)

    def state(self, job: str, tenant: str = "t0") -> JobState:
        return self.jobs.find(job, tenant).state

    def ready(self, limit: int = 100) -> list[str]:
        return [job.id for job in self.waiting.take_ready(limit=limit, again_after_s=10.0)]

    def outcomes(self, job: str) -> list[tuple[int, str | None]]:
        return [(one.attempt, one.outcome) for one in self.jobs.attempts(job, "t0")]
