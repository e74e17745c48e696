"""A batch through which every part of the service is killed, held against one that nothing happened to."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pytest

from harness.polling import wait_for
from harness.served import Served
from harness.struck import Struck

NUM_LINES = 36
KILLED = [
    # The two that hold what is on its way; what the others undo is the same for all jobs (test_jobs_killed.py).
    ("the jobs worker", "the API"),
    pytest.param(("the jobs worker", "the worker", "the broker", "the API"), marks=pytest.mark.soak),
]
END_S = 240.0

_MADE = re.compile(rb"(batch_req_|req_|cmpl-)[0-9a-f]{32}|(?<=\"created\":)\d+")


def batch_of(served: Served, client: openai.OpenAI, key: str, file_id: str) -> str:
    """A batch whose draws follow from a seed of its own choice, which OpenAI's route has no word for."""
    spec = {"data": file_id, "endpoint": "/v1/completions", "seed": 11, "window": 4, "model": "tiny"}
    job = {"kind": "batch", "spec": spec, "max_attempts": 20}
    made = httpx.post(f"{served.url}/api/native/v1/jobs", json=job, headers={"X-API-Key": key}, timeout=30)
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


def num_drawn(served: Served, job: str) -> int:
    """Samples of a job that have ended."""
    (row,) = served.query(
        "SELECT COUNT(*) FROM operation o JOIN sampling_session p ON p.id = o.lane JOIN session s ON s.id = p.session"
        " WHERE s.job = ? AND o.state = 'done'",
        job,
    )
    return int(row[0])


def ended(client: openai.OpenAI, batch: str) -> openai.types.Batch:
    def look() -> openai.types.Batch | None:
        try:
            found = client.batches.retrieve(batch)
        except (openai.APIConnectionError, openai.InternalServerError):
            return None
        return found if found.status in {"completed", "failed", "expired", "cancelled"} else None

    return wait_for(look, what="the batch's end", deadline_s=END_S)


def content_of(client: openai.OpenAI, batch: openai.types.Batch) -> bytes:
    """What was written, without what names the batch."""
    assert batch.output_file_id is not None, batch
    return _MADE.sub(b"0", client.files.content(batch.output_file_id).content)


def uploaded(client: openai.OpenAI) -> openai.types.FileObject:
    """Lines to be completed, of which each ninth is too long."""
    lines = [
        {
            "custom_id": f"n-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{n} and {n}" if n % 9 else "x " * 5000, "max_tokens": 12},
        }
        for n in range(NUM_LINES)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    return client.files.create(file=("lines.jsonl", content), purpose="batch")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", KILLED, ids="+".join)
def test_whatever_is_killed_a_batch_writes_the_same_bytes_and_draws_nothing_twice(
    struck_model: Struck, killed: tuple[str, ...]
) -> None:
    served = struck_model.served
    key = served.create_key("batches")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, timeout=60, max_retries=5) as client:
        file = uploaded(client)
        calm = ended(client, batch_of(served, client, key, file.id))

        job = batch_of(served, client, key, file.id)
        for number, part in enumerate(killed, 1):
            wait_for(lambda number=number: num_drawn(served, job) >= 5 * number, what="some samples", deadline_s=END_S)
            served.part(part).kill()
        struck = ended(client, job)

        assert calm.status == struck.status == "completed", (calm, struck, served.logs())
        assert calm.request_counts == struck.request_counts
        assert calm.request_counts is not None and calm.request_counts.failed == len(range(0, NUM_LINES, 9))
        assert content_of(client, struck) == content_of(client, calm)
        assert num_drawn(served, job) == struck.request_counts.completed  # type: ignore[union-attr]
        answers = [json.loads(line) for line in content_of(client, calm).splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"n-{n}" for n in range(NUM_LINES) if n % 9]


@pytest.mark.soak
def test_kills_at_points_drawn_by_chance_leave_the_same_bytes(struck_model: Struck) -> None:
    served = struck_model.served
    key = served.create_key("batches")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, timeout=60, max_retries=20) as client:
        file = uploaded(client)
        calm = content_of(client, ended(client, batch_of(served, client, key, file.id)))
        for seed in range(4):
            job = batch_of(served, client, key, file.id)
            with struck_model.crashes.drawn(seed) as told:
                struck = ended(client, job)
            assert content_of(client, struck) == calm, told
            assert num_drawn(served, job) == struck.request_counts.completed, told  # type: ignore[union-attr]
