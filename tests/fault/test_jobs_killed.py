"""SIGKILL at the narrow moments of a job's life, and to the parts it stands on: its result is what it would have been.

The jobs are real ones on the embedded stack: a file of operations, Celery's messages, the jobs worker's own process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest
import redis

from harness.crashes import Crashes
from harness.polling import wait_for, wait_until
from harness.served import Served
from harness.struck import Struck
from twinkle.core.clock import SystemClock
from twinkle.core.job import Job, JsonObject
from twinkle.jobs.stored_files import StoredFiles
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.stores import Stores
from twinkle.tasks.jobs import JOBS_QUEUE

MODEL = "null"
NUM_STEPS = 12
POINTS = ("job.claimed", "job.saved:3", "job.worked", "job.ended")
UNDER_A_JOB = ("the API", "the worker", "the broker", "the jobs worker")
_DONE_S = 150.0


def _line(op: str, **fields: Any) -> str:
    return json.dumps({"op": op, **fields})


def _operations() -> bytes:
    """Steps on different data, samples in between, and a checkpoint at the end."""
    lines = []
    for step in range(NUM_STEPS):
        tokens = list(range(step, step + 8))
        inputs = {"target_tokens": tokens, "weights": [1.0] * 8}
        lines.append(_line("forward_backward", data=[{"tokens": tokens, "inputs": inputs}]))
        lines.append(_line("optim_step"))
        if step % 4 == 0:
            lines.append(_line("sample", prompt=tokens, sampling_params={"max_tokens": 4, "seed": step}))
    lines.append(_line("save_weights", name="final"))
    return "\n".join(lines).encode()


@dataclass
class JobsStruck:
    """A served stack, a tenant of it, and the result of a job that nothing happened to."""

    served: Served
    crashes: Crashes
    stores: Stores
    key: str
    tenant: str
    file: str

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self.served.url}/api/native/v1", headers={"X-API-Key": self.key}, timeout=30)

    def submit(self, kind: str = "ops", spec: JsonObject | None = None) -> str:
        spec = self.ops() if spec is None else spec

        def ask() -> str | None:
            try:
                with self.http() as http:
                    answer = http.post("/jobs", json={"kind": kind, "spec": spec, "max_attempts": 10})
            except httpx.TransportError:
                return None
            return str(answer.json()["id"]) if answer.is_success else None

        return wait_for(ask, what="a job is taken on")

    def ops(self, **fields: Any) -> JsonObject:
        """The spec of the job of operations."""
        return {"model": MODEL, "data": self.file, "rank": 4, "window": 2, "seed": 11, **fields}

    def table(self, job_id: str) -> list[tuple[Any, ...]]:
        """What a sweep's or a flow's members came to, in their order."""
        with self.http() as http:
            told = http.get(f"/jobs/{job_id}/members").raise_for_status().json()["members"]
        return [(one["name"], one["kind"], one["state"], one.get("values"), one.get("metric")) for one in told]

    def members(self, job_id: str) -> list[Job]:
        """All that ran of it, sweeps in flows included."""
        found = self.stores.jobs.page(self.tenant, limit=100, parent=job_id)
        return sorted((one for job in found for one in (self.members(job.id) or [job])), key=lambda job: job.id)

    def ended(self, job_id: str) -> Job:
        def job() -> Job | None:
            found = self.stores.jobs.find(job_id, self.tenant)
            return found if found.state.is_final else None

        try:
            return wait_for(job, what="the job's end", deadline_s=_DONE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.stand(job_id)}\n{self.served.logs()}") from None

    def stand(self, job_id: str) -> str:
        """Who holds it, and what was said of it, for a failed test."""
        (held,) = self.stores.database.read("SELECT * FROM job WHERE id = ?", (job_id,))
        told = self.stores.jobs.events(job_id, self.tenant)
        return f"{held} now {SystemClock().now()}, {told[-5:]}"

    def results(self, job: Job) -> bytes:
        """What it wrote, under one name for the run, which every job has of its own."""
        assert job.failure is None, job.failure
        assert job.result is not None
        files = StoredFiles(job, self.stores, open_blob_store(str(self.served.home / "objects")), SystemClock())
        content = asyncio.run(files.read(job.result["results"]))
        run = str(job.result["run_id"])
        return content.replace(run.encode(), b"RUN").replace(run.split(":")[0].encode(), b"SESSION")

    def operations(self, job: Job) -> list[tuple[Any, ...]]:
        """What the journal has of it: kinds and states in their order, each number once."""
        assert job.result is not None
        session = str(job.result["run_id"]).split(":")[0]
        return [
            tuple(row)
            for row in self.stores.database.read(
                "SELECT seq, kind, state FROM operation WHERE lane LIKE ? ORDER BY lane, seq", (f"{session}%",)
            )
        ]


@pytest.fixture(scope="module")
def struck(struck: Struck) -> Iterator[JobsStruck]:
    served = struck.served
    key = served.create_key("jobs")
    stores = Stores.at(f"sqlite:///{served.home / 'journal.db'}", SystemClock())
    valid = stores.tenants.key(key)
    assert valid is not None
    owner = cast(Job, SimpleNamespace(id="uploaded", tenant=valid.tenant))
    blobs = open_blob_store(str(served.home / "objects"))
    files = StoredFiles(owner, stores, blobs, SystemClock())
    file = asyncio.run(files.write("operations", _operations(), purpose="ops"))
    yield JobsStruck(served, struck.crashes, stores, key, valid.tenant, file)
    stores.close()


@pytest.fixture(scope="module")
def calm(struck: JobsStruck) -> Job:
    """A job that nothing happens to."""
    return struck.ended(struck.submit())


def test_a_job_whose_worker_is_killed_at_each_narrow_moment_gives_the_same_bytes(struck: JobsStruck, calm: Job) -> None:
    # The one before the next, so that each has something left to kill.
    names = [point.partition(":")[0] for point in POINTS]
    for name, point in zip(names, POINTS, strict=True):
        struck.crashes.arm(name, count=int(point.partition(":")[2] or 1))
    killed = struck.ended(struck.submit())

    for name in names:
        struck.crashes.wait(name)
    assert struck.results(killed) == struck.results(calm)
    assert struck.operations(killed) == struck.operations(calm)
    outcomes = [one.outcome for one in struck.stores.jobs.attempts(killed.id, struck.tenant)]
    assert set(outcomes[:-1]) == {"lost"}
    assert outcomes[-1] == "succeeded"
    assert len(outcomes) >= len(POINTS) - 1, "each kill but the last one, behind the end, cost an attempt"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_a_job_through_which_somebody_is_killed_at_points_drawn_by_chance_gives_the_same_bytes(
    struck: JobsStruck, calm: Job, seed: int
) -> None:
    with struck.crashes.drawn(seed) as told:
        killed = struck.ended(struck.submit())

    assert struck.results(killed) == struck.results(calm), told
    assert struck.operations(killed) == struck.operations(calm), told


@pytest.mark.parametrize("part", UNDER_A_JOB)
def test_a_job_goes_on_when_a_part_is_killed_under_it(struck: JobsStruck, calm: Job, part: str) -> None:
    job_id = struck.submit()
    wait_until(
        lambda: (
            struck.stores.jobs.find(job_id, struck.tenant).state == "running"
            or struck.stores.jobs.find(job_id, struck.tenant).state.is_final
        ),
        what="the job under way",
    )
    struck.served.part(part).kill()
    ended = struck.ended(job_id)

    assert struck.results(ended) == struck.results(calm)
    assert struck.operations(ended) == struck.operations(calm)


def test_a_job_whose_message_is_lost_is_handed_out_again(struck: JobsStruck, calm: Job) -> None:
    url = (struck.served.home / "broker-url").read_text().strip()
    worker = struck.served.part("the jobs worker")
    # While the supervisor stands still, no next jobs worker comes that would take the message first.
    with struck.served.standing_still(struck.served.pid), redis.Redis.from_url(url, socket_timeout=None) as broker:
        worker.kill()
        wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE, what="the jobs worker's end")
        job_id = struck.submit()
        assert broker.blpop(JOBS_QUEUE, timeout=60), "no message"
        broker.flushall()

    assert struck.results(struck.ended(job_id)) == struck.results(calm)


def test_a_jobs_worker_that_is_asked_to_stop_gives_its_jobs_back_at_once(struck: JobsStruck, calm: Job) -> None:
    with struck.served.standing_still(struck.served.engine_pid()):
        job_id = struck.submit()
        wait_until(lambda: struck.stores.jobs.find(job_id, struck.tenant).state == "running", what="the job under way")
        struck.served.part("the jobs worker").terminate()
        wait_until(lambda: "asked to stop" in _told(struck, job_id), what="the job given back", deadline_s=10)
    ended = struck.ended(job_id)

    assert struck.results(ended) == struck.results(calm)
    assert ended.attempt == 1, "no attempt is used up"


def test_a_jobs_worker_that_stood_still_finds_its_job_done_by_another_and_writes_nothing_more(
    struck: JobsStruck, calm: Job
) -> None:
    frozen = struck.served.part("the jobs worker")
    with ExitStack() as stopped:
        with struck.served.standing_still(struck.served.engine_pid()):
            job_id = struck.submit()
            wait_until(
                lambda: struck.stores.jobs.find(job_id, struck.tenant).state == "running", what="the job under way"
            )
            stopped.enter_context(struck.served.standing_still(frozen))
        with struck.served.beside("jobs-worker", "--home", str(struck.served.home)):
            ended = struck.ended(job_id)
    after = struck.ended(struck.submit())

    assert struck.results(ended) == struck.results(after) == struck.results(calm)
    assert struck.operations(ended) == struck.operations(calm)
    (lost, succeeded) = struck.stores.jobs.attempts(job_id, struck.tenant)
    assert (lost.outcome, succeeded.outcome) == ("lost", "succeeded")
    assert lost.owner != succeeded.owner
    assert struck.stores.jobs.find(job_id, struck.tenant) == ended, "what it wakes with is no news"


# A flow whose first job is the sweep: the sweep alone once more in soak.
@pytest.mark.parametrize("kind", [pytest.param("sweep", marks=pytest.mark.soak), "flow"])
def test_a_sweep_and_a_flow_go_on_when_the_jobs_worker_is_killed_and_another_one_helps(
    struck: JobsStruck, calm: Job, kind: str
) -> None:
    """A second jobs worker beside the first: both are on one queue, and one is killed in the middle."""
    sweep = {"template": {"kind": "ops", "spec": struck.ops()}, "parameters": {"rank": [2, 4, 8]}}
    sweep |= {"at_once": 2, "metric": "operations", "goal": "max"}
    later = struck.ops(seed="${first.best.operations}", model=MODEL)
    flow = {"jobs": {"first": {"kind": "sweep", "spec": sweep}, "then": {"kind": "ops", "spec": later}}}
    spec = sweep if kind == "sweep" else flow
    undisturbed = struck.submit(kind, spec)
    assert struck.ended(undisturbed).failure is None

    with struck.served.beside("jobs-worker", "--home", str(struck.served.home)):
        job_id = struck.submit(kind, spec)
        struck.crashes.arm("job.saved", count=3)
        struck.crashes.wait("job.saved")
        ended = struck.ended(job_id)

    assert ended.failure is None
    assert struck.table(job_id) == struck.table(undisturbed)
    of_both = [struck.members(one) for one in (undisturbed, job_id)]
    assert len(of_both[0]) == len(of_both[1]) == (3 if kind == "sweep" else 4)
    assert [struck.results(one) for one in of_both[0]] == [struck.results(one) for one in of_both[1]]
    assert [struck.operations(one) for one in of_both[0]] == [struck.operations(one) for one in of_both[1]]
    outcomes = [one.outcome for job in of_both[1] for one in struck.stores.jobs.attempts(job.id, struck.tenant)]
    assert outcomes.count("succeeded") == len(of_both[1])
    assert set(outcomes) == {"succeeded", "lost"}
    runners = {one.owner for job in of_both[1] for one in struck.stores.jobs.attempts(job.id, struck.tenant)}
    assert len(runners) >= 2


def _told(struck: JobsStruck, job_id: str) -> str:
    return " ".join(event.message for event in struck.stores.jobs.events(job_id, struck.tenant))
