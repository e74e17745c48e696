"""Batches of samples, run in process against a worker that computes nothing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.byte_tokenizer import write_tokenizer
from harness.clock import HandClock
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker
from harness.jobs import JobRig, MemoryFiles, job_rig
from harness.polling import wait_for
from twinkle.core.job import Job, JobKind, JobState
from twinkle.core.settings import Settings
from twinkle.server.app import prepare_database
from twinkle.wire.sampling import parse_sample

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def settings(
    request: pytest.FixtureRequest,
    redis_url: str,
    make_database_url: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Settings:
    """A service of its own: its mesh has another worker than that of the other tests."""
    settings = Settings(
        home=tmp_path_factory.mktemp("home"), database_url=make_database_url(request.param), redis_url=redis_url
    )
    prepare_database(settings)
    return settings


@pytest.fixture(scope="module")
def files() -> MemoryFiles:
    return MemoryFiles()


@pytest.fixture(scope="module")
def worker(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeWorker]:
    """A worker whose model has a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    worker = FakeWorker(settings, capabilities=CAPABILITIES.model_copy(update={"tokenizer_path": str(folder)}))
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def rig(settings: Settings, worker: FakeWorker, files: MemoryFiles) -> Iterator[JobRig]:
    """A runner with the service's plans."""
    with job_rig(settings, open_files=lambda job, door: files) as rig:
        yield rig


def line(number: int, *, url: str = TEXT, **body: Any) -> dict[str, Any]:
    content = {"prompt": f"number {number}", "max_tokens": 3} if url == TEXT else {}
    body = {"model": BASE_MODEL, **content, **body}
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}


def put(files: MemoryFiles, lines: list[Any]) -> str:
    file_id = f"file-{secrets.token_hex(8)}"
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    files.contents[file_id] = "\n".join(texts).encode()
    return file_id


def spec_of(file_id: str, **more: Any) -> dict[str, Any]:
    return {"data": file_id, "endpoint": TEXT, **more}


def read(files: MemoryFiles, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(one) for one in files.contents[file_id].splitlines()]


def output_of(files: MemoryFiles, job: Job) -> list[dict[str, Any]]:
    assert job.result is not None, job.failure
    return read(files, job.result["output_file_id"])


def test_lines_are_answered_in_their_order_by_the_route_they_name(rig: JobRig, files: MemoryFiles, tenant: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [line(n, url=CHAT, messages=messages, max_completion_tokens=n + 1, n=1 + n % 2) for n in range(9)]

    job = rig.do(tenant, JobKind.BATCH, spec_of(put(files, lines), endpoint=CHAT))

    assert (job.state, job.phase) == (JobState.SUCCEEDED, "finalizing"), job.failure
    answers = output_of(files, job)
    assert [answer["custom_id"] for answer in answers] == [one["custom_id"] for one in lines]
    first = answers[0]["response"]["body"]
    assert first["choices"][0]["message"]["content"] == "!"
    assert first["object"] == "chat.completion"
    assert first["created"] == int(job.created_at)
    assert set(first["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert len(answers[1]["response"]["body"]["choices"]) == 2
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    assert job.result is not None
    assert job.result["output_tokens"] == sum((n + 1) * (1 + n % 2) for n in range(9))
    assert (job.progress["done"], job.progress["total"], job.progress["completed"]) == (9, 9, 9)
    assert len({answer["id"] for answer in answers} | {answer["response"]["request_id"] for answer in answers}) == 18


def test_refused_lines_are_written_to_a_file_of_errors_and_the_others_answered(
    rig: JobRig, files: MemoryFiles, tenant: str
) -> None:
    lines = [line(0), line(1, prompt="x" * 3000), line(2)]

    job = rig.do(tenant, JobKind.BATCH, spec_of(put(files, lines)))

    assert [answer["custom_id"] for answer in output_of(files, job)] == ["request-0", "request-2"]
    assert job.result is not None
    (error,) = read(files, job.result["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("request-1", 400)
    assert error["response"]["body"]["error"]["param"] == "prompt"
    assert (job.result["completed"], job.result["failed"], job.result["total"]) == (2, 1, 3)


def test_all_that_is_wrong_in_a_file_is_told_by_line_before_anything_starts(
    rig: JobRig, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    num_before = len(worker.executed)
    wrong = [
        line(0),
        "{",
        line(2, temperature=9),
        line(0),
        line(4, stream=True),
        line(5, url=CHAT, messages=[{"role": "user", "content": "hi"}]),
        line(6, model="gpt-9"),
        *("[]" for _ in range(200)),
    ]

    job = rig.do(tenant, JobKind.BATCH, spec_of(put(files, wrong)))

    assert job.state is JobState.FAILED
    assert job.failure is not None
    errors = job.failure.details["errors"]
    told = {(error["line"], error["param"]) for error in errors}
    assert {
        (2, None),
        (3, "body.temperature"),
        (4, "custom_id"),
        (5, "body.stream"),
        (6, "url"),
    } <= told
    assert len(errors) == 100
    assert job.failure.details["num_wrong"] == 206
    assert len(worker.executed) == num_before


def test_a_model_nobody_serves_is_told_with_the_first_line_that_asks_for_it(
    rig: JobRig, files: MemoryFiles, tenant: str
) -> None:
    job = rig.do(tenant, JobKind.BATCH, spec_of(put(files, [line(0), line(1, model="gpt-9"), line(2, model="gpt-9")])))

    assert job.failure is not None
    (error,) = job.failure.details["errors"]
    assert (error["line"], error["code"], error["param"]) == (2, "model_not_found", "body.model")


def test_a_line_without_a_seed_gets_one_that_follows_from_the_job_and_its_place(
    rig: JobRig, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    without_model = line(0)
    del without_model["body"]["model"]
    file_id = put(files, [without_model, line(1, seed=5), line(2)])

    def seeds() -> list[int | None]:
        num_before = len(worker.executed)
        job = rig.do(tenant, JobKind.BATCH, spec_of(file_id, model=BASE_MODEL, window=1), seed=11)
        assert job.state is JobState.SUCCEEDED, job.failure
        samples = [parse_sample(worker.payload(claim)) for claim in worker.executed[num_before:]]
        return [sample.sampling_params.seed for sample in samples]

    first, again = seeds(), seeds()

    assert first == again
    assert first[1] == 5
    assert None not in first and len(set(first)) == 3


def test_a_batch_interrupted_again_and_again_writes_the_same_bytes_and_draws_nothing_twice(
    rig: JobRig, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    lines = [line(n) if n % 7 else line(n, prompt="x" * 3000) for n in range(40)]
    file_id = put(files, lines)
    calm = rig.do(tenant, JobKind.BATCH, spec_of(file_id, window=4), seed=3)
    job = rig.submit(tenant, JobKind.BATCH, spec_of(file_id, window=4), seed=3)

    for _ in range(6):
        with worker.paused():
            running = rig.start(job.id)
            wait_for(lambda: rig.stores.journal.num_open_samples(tenant) >= 2, what="a window")
            rig.stores.jobs.request_pause(job.id, tenant)
            running.join()
        rig.stores.jobs.request_resume(job.id, tenant)
    ended = rig.run(job.id)

    assert ended is not None and ended.result is not None and calm.result is not None

    def told(one: Job, which: str) -> bytes:
        assert one.result is not None
        content = files.contents[one.result[which]]
        for answer in read(files, one.result[which]):
            for made in (answer["id"], answer["response"]["request_id"], answer["response"]["body"].get("id", "-")):
                content = content.replace(made.encode(), b"")
        return content.replace(str(int(one.created_at)).encode(), b"")

    for which in ("output_file_id", "error_file_id"):
        assert told(ended, which) == told(calm, which)
    lanes = [
        lane.id
        for lane in rig.stores.database.read(
            "SELECT s.id FROM sampling_session s JOIN session o ON o.id = s.session WHERE o.job = ?", (job.id,)
        )
    ]
    drawn = [claim.seq for lane in lanes for claim in worker.executed_of(lane)]
    assert len(drawn) == len(set(drawn)) == calm.result["completed"]


def test_a_cancelled_batch_keeps_what_was_answered_and_draws_no_more(
    rig: JobRig, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    job = rig.submit(tenant, JobKind.BATCH, spec_of(put(files, [line(n) for n in range(500)]), window=2))
    running = rig.start(job.id)
    wait_for(lambda: len([1 for claim in worker.executed if claim.tenant == tenant]) > 5, what="some answers")
    with worker.paused():
        rig.stores.jobs.request_cancel(job.id, tenant)
        running.join()

    ended = rig.stores.jobs.find(job.id, tenant)
    assert ended.state is JobState.CANCELLED
    answers = output_of(files, ended)
    assert 5 <= len(answers) < 500
    assert [answer["custom_id"] for answer in answers] == [f"request-{n}" for n in range(len(answers))]
    assert ended.result is not None and ended.result["error_file_id"] is None
    assert rig.stores.journal.num_open_samples(tenant) == 0


def test_a_cancelled_batch_is_charged_for_what_was_drawn_and_for_nothing_else(
    rig: JobRig, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    job = rig.submit(tenant, JobKind.BATCH, spec_of(put(files, [line(n) for n in range(300)]), window=4))
    running = rig.start(job.id)
    wait_for(lambda: len([1 for claim in worker.executed if claim.tenant == tenant]) > 5, what="some answers")
    with worker.paused():
        rig.stores.jobs.request_cancel(job.id, tenant)
        running.join()

    cancelled = rig.stores.jobs.find(job.id, tenant)
    charged = list(rig.stores.accounting.work(tenant, start=0.0, end=2.0**40).values())
    answers = output_of(files, cancelled)
    assert cancelled.result is not None
    assert 5 < len(answers) < 300
    assert sum(work.num_sampled for work in charged) == cancelled.result["output_tokens"]
    assert sum(work.num_prefilled for work in charged) == cancelled.result["input_tokens"]


def test_a_batch_whose_time_is_over_keeps_what_was_answered_and_names_the_rest(
    settings: Settings, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    clock = HandClock()
    with job_rig(settings, open_files=lambda job, door: files, clock=clock) as rig:
        spec = spec_of(put(files, [line(n) for n in range(300)]), window=2)
        job = rig.submit(tenant, JobKind.BATCH, spec, expires_at=clock.now() + 86400)
        running = rig.start(job.id)
        wait_for(lambda: len([1 for claim in worker.executed if claim.tenant == tenant]) > 5, what="some answers")
        with worker.paused():
            clock.move(86400)
            running.join()
        ended = rig.stores.jobs.find(job.id, tenant)

    assert ended.state is JobState.FAILED
    assert ended.failure is not None and ended.failure.code == "expired"
    details = ended.failure.details
    answered = [answer["custom_id"] for answer in read(files, details["output_file_id"])]
    errors = read(files, details["error_file_id"])
    assert sorted(answered + [error["custom_id"] for error in errors]) == sorted(f"request-{n}" for n in range(300))
    assert len(answered) > 5 and len(errors) > 5
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}
    assert all(error["response"] is None for error in errors)


def test_a_batch_paused_for_a_week_goes_on_where_it_was(
    settings: Settings, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    clock = HandClock()
    with job_rig(settings, open_files=lambda job, door: files, clock=clock) as rig:
        spec = spec_of(put(files, [line(n) for n in range(30)]), window=2)
        job = rig.submit(tenant, JobKind.BATCH, spec, expires_at=clock.now() + 86400)
        with worker.paused():
            running = rig.start(job.id)
            wait_for(lambda: rig.stores.journal.num_open_samples(tenant) == 2, what="a window")
            rig.stores.jobs.request_pause(job.id, tenant)
            running.join()
        clock.move(7 * 86400)
        rig.stores.jobs.request_resume(job.id, tenant)
        ended = rig.run(job.id)

    assert ended is not None and ended.state is JobState.SUCCEEDED, ended
    assert len(output_of(files, ended)) == 30


def test_a_dry_run_reads_every_prompt_as_its_route_would_and_draws_nothing(
    rig: JobRig, files: MemoryFiles, tenant: str, worker: FakeWorker
) -> None:
    lines = [line(1, prompt="four", n=2), line(2, prompt=[[1, 2, 3], [4]], max_tokens=5), line(3, prompt="x")]
    file_id = put(files, lines)
    told = rig.do(tenant, JobKind.BATCH, spec_of(file_id, dry_run=True))
    num_before = len(worker.executed)
    real = rig.do(tenant, JobKind.BATCH, spec_of(file_id))

    assert told.result is not None and real.result is not None
    tokens = told.result["tokens"]
    assert (told.result["requests"], told.result["refused"], told.result["models"]) == (3, 0, {BASE_MODEL: 3})
    assert tokens["prefilled"] == real.result["input_tokens"]
    assert (tokens["drawn_least"], tokens["drawn"]) == (2 + 2 + 1, 2 * 3 + 2 * 5 + 3)
    assert tokens["drawn_least"] <= real.result["output_tokens"] <= tokens["drawn"]
    assert told.result["memory"] is None
    assert not [claim for claim in worker.executed[:num_before] if claim.tenant == tenant]


def test_a_dry_run_of_a_batch_with_a_wrong_line_fails_like_the_batch(
    rig: JobRig, files: MemoryFiles, tenant: str
) -> None:
    file_id = put(files, [line(1), "no JSON"])
    told = rig.do(tenant, JobKind.BATCH, spec_of(file_id, dry_run=True))

    assert told.failure is not None
    assert told.failure.code == "invalid_batch"
