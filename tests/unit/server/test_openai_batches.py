"""Batches, through the official client: a served app, a runner of jobs, and a worker that computes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest

from harness.byte_tokenizer import write_tokenizer
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker
from harness.jobs import JobRig, MemoryFiles, job_rig
from harness.polling import wait_for

if TYPE_CHECKING:
    from conftest import Api, ServeApi

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Bench:
    """A service that answers batches, as one tenant's client sees it."""

    api: Api
    worker: FakeWorker
    rig: JobRig
    files: MemoryFiles

    def client(self) -> openai.OpenAI:
        """A new tenant's."""
        return openai.OpenAI(base_url=f"{self.api.url}/v1", api_key=self.api.new_key(), max_retries=0, timeout=30)

    def put(self, name: str, num_lines: int, **body: Any) -> str:
        """A file of conversations."""
        self.files.contents[name] = b"\n".join(chat(n, **body) for n in range(num_lines))
        return name


def chat(number: int, **body: Any) -> bytes:
    content = {"model": BASE_MODEL, "messages": [{"role": "user", "content": f"{number}?"}], "max_tokens": 2, **body}
    return json.dumps({"custom_id": f"r-{number}", "method": "POST", "url": CHAT, "body": content}).encode()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def bench(
    request: pytest.FixtureRequest,
    serve_api: ServeApi,
    make_database_url: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    files = MemoryFiles()
    with serve_api(make_database_url(request.param), max_outstanding_samples=100) as api:
        tokenizer = CAPABILITIES.model_copy(update={"tokenizer_path": str(folder)})
        worker = FakeWorker(api.settings, capabilities=tokenizer)
        worker.start()
        with job_rig(api.settings, open_files=lambda job, door: files) as rig:
            yield Bench(api, worker, rig, files)
        worker.stop()


def test_a_batch_goes_from_validating_to_completed_with_a_time_for_each(bench: Bench) -> None:
    with bench.client() as client:
        made = client.batches.create(
            input_file_id=bench.put("file-1", 3),
            endpoint=CHAT,
            completion_window="24h",
            metadata={"topic": "sums"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        bench.rig.run(made.id)
        ended = client.batches.retrieve(made.id)

    assert (made.status, made.id[:6], made.object) == ("validating", "batch_", "batch")
    assert made.expires_at == pytest.approx(made.created_at + 24 * 3600, abs=1)
    assert ended.status == "completed"
    assert ended.request_counts is not None and ended.request_counts.to_dict() == {
        "total": 3,
        "completed": 3,
        "failed": 0,
    }
    times = [ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at]
    assert times == sorted(times)  # type: ignore[type-var]
    assert (ended.failed_at, ended.expired_at, ended.cancelled_at, ended.errors) == (None,) * 4
    assert (ended.model, ended.metadata) == (BASE_MODEL, {"topic": "sums"})
    assert ended.usage is not None and ended.usage.output_tokens == 6
    assert ended.output_file_id is not None and ended.error_file_id is None
    answers = [json.loads(one) for one in bench.files.contents[ended.output_file_id].splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["r-0", "r-1", "r-2"]
    assert openai.types.chat.ChatCompletion.model_validate(answers[0]["response"]["body"]).choices[0].message.content


def test_what_is_wrong_with_a_file_is_told_with_its_lines(bench: Bench) -> None:
    with bench.client() as client:
        made = client.batches.create(
            input_file_id=bench.put("file-2", 2, temperature=9), endpoint=CHAT, completion_window="24h"
        )
        bench.rig.run(made.id)
        failed = client.batches.retrieve(made.id)

    assert (failed.status, failed.in_progress_at, failed.output_file_id) == ("failed", None, None)
    assert failed.failed_at is not None
    assert failed.errors is not None and failed.errors.data is not None
    assert [(error.line, error.param) for error in failed.errors.data] == [
        (1, "body.temperature"),
        (2, "body.temperature"),
    ]


def test_a_cancelled_batch_is_first_cancelling_then_cancelled_with_what_it_has(bench: Bench) -> None:
    with bench.client() as client:
        made = client.batches.create(input_file_id=bench.put("file-3", 300), endpoint=CHAT, completion_window="24h")
        with bench.worker.paused():
            running = bench.rig.start(made.id)
            wait_for(lambda: client.batches.retrieve(made.id).status == "in_progress", what="it is under way")
            cancelling = client.batches.cancel(made.id)
            running.join()
        cancelled = client.batches.retrieve(made.id)
        again = client.batches.cancel(made.id)

    assert cancelling.status == "cancelling" and cancelling.cancelling_at is not None
    assert cancelled.status == again.status == "cancelled" and cancelled.cancelled_at is not None
    assert cancelled.request_counts is not None
    assert cancelled.request_counts.total == 300 > cancelled.request_counts.completed


def test_batches_are_listed_newest_first_page_by_page_and_are_nobody_elses(bench: Bench) -> None:
    with bench.client() as client, bench.client() as stranger:
        made = [
            client.batches.create(input_file_id="file-4", endpoint=CHAT, completion_window="24h").id for _ in range(5)
        ]

        assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
        assert [batch.id for batch in client.batches.list(limit=2).data] == made[:2:-1]
        assert list(stranger.batches.list()) == []
        for use in (stranger.batches.retrieve, stranger.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                use(made[0])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"completion_window": "48h"}, "completion_window"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"input_file_id": "../x"}, "input_file_id"),
    ],
)
def test_what_a_batch_cannot_be_is_refused_by_name(bench: Bench, changes: dict[str, Any], param: str) -> None:
    wanted = {"input_file_id": "file-5", "endpoint": CHAT, "completion_window": "24h", **changes}

    with bench.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**wanted)

    assert refused.value.param == param


def test_the_same_key_is_the_same_batch(bench: Bench) -> None:
    headers = {"Idempotency-Key": "once"}
    wanted = {"endpoint": CHAT, "completion_window": "24h", "extra_headers": headers}
    with bench.client() as client:
        first = client.batches.create(input_file_id="file-6", **wanted)  # type: ignore[arg-type]

        assert client.batches.create(input_file_id="file-6", **wanted).id == first.id  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError):
            client.batches.create(input_file_id="file-7", **wanted)  # type: ignore[arg-type]
