"""The largest files: a gigabyte in parts, a batch of as many lines as one may have, in memory that does not grow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from harness.polling import wait_for
from harness.served import Served
from twinkle.client import Client

FILE_BYTES = 2**30
MAX_SHARE = 1 / 8
"""Of a file, by which the memory of whoever takes it may grow."""
NUM_LINES = 50_000
NUM_FEW = 1000
END_S = 3000.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("large") / "home", model=str(tiny_model), model_name="tiny") as served:
        yield served


def peak_bytes(process: psutil.Process) -> int:
    """The most memory that a process has had at any time."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def write_rows(path: Path, num_bytes: int) -> str:
    """Rows of a conversation each, of about so many bytes together; their digest."""
    digest, answer = hashlib.sha256(), "as it was said, " * 240
    with path.open("wb") as file:
        number = 0
        while file.tell() < num_bytes:
            turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}]
            line = json.dumps({"messages": turns}).encode() + b"\n"
            digest.update(line)
            file.write(line)
            number += 1
    return digest.hexdigest()


def test_a_gigabyte_goes_up_in_parts_and_down_again_in_memory_that_does_not_grow_with_it(
    served: Served, tmp_path: Path
) -> None:
    api = served.part("the API")
    with Client(served.url, served.create_key("large")) as client:
        # What it takes for any file of several parts is no matter of its size.
        write_rows(tmp_path / "small.jsonl", FILE_BYTES // 16)
        small = client.files.upload(tmp_path / "small.jsonl")
        client.files.download(small.id, tmp_path / "small.back")
        before = peak_bytes(api)

        sha256 = write_rows(tmp_path / "large.jsonl", FILE_BYTES)
        large = client.files.upload(tmp_path / "large.jsonl")
        client.files.download(large.id, tmp_path / "large.back")
        growth = peak_bytes(api) - before

    print(f"{large.size_bytes=} {before=} {growth=}")
    assert large.sha256 == sha256
    assert large.status == "processed", "every line was looked at"
    with (tmp_path / "large.back").open("rb") as back:
        assert hashlib.file_digest(back, "sha256").hexdigest() == sha256
    assert growth < MAX_SHARE * large.size_bytes


def test_a_batch_of_as_many_lines_as_one_may_have_is_answered_in_their_order(served: Served) -> None:
    key = served.create_key("batches")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, timeout=120, max_retries=5) as client:
        answered(served, client, key, NUM_FEW)
        jobs = served.part("the jobs worker")
        before = peak_bytes(jobs)

        output = answered(served, client, key, NUM_LINES)

    growth = peak_bytes(jobs) - before
    print(f"{before=} {growth=} {len(output)=}")
    answers = [json.loads(line) for line in output.splitlines()]
    assert [one["custom_id"] for one in answers] == [f"n-{number}" for number in range(NUM_LINES)]
    assert all(one["response"]["status_code"] == 200 for one in answers)
    assert growth < before / 2, "fifty times the lines are no more in memory"


def answered(served: Served, client: openai.OpenAI, key: str, num_lines: int) -> bytes:
    """A batch of so many lines to its end; its output file."""
    body = {"prompt": [5, 6, 7], "max_tokens": 1}
    lines = [
        json.dumps({"custom_id": f"n-{number}", "method": "POST", "url": "/v1/completions", "body": body})
        for number in range(num_lines)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    job = {"kind": "batch", "spec": {"data": file.id, "endpoint": "/v1/completions", "model": "tiny", "window": 256}}
    made = httpx.post(f"{served.url}/api/native/v1/jobs", json=job, headers={"X-API-Key": key}, timeout=60)
    assert made.status_code == 200, made.text
    batch = made.json()["id"]

    def look() -> openai.types.Batch | None:
        found = client.batches.retrieve(batch)
        return found if found.status in {"completed", "failed", "expired", "cancelled"} else None

    done = wait_for(look, what="the batch's end", deadline_s=END_S)
    assert done.status == "completed", done
    assert done.request_counts is not None and done.request_counts.completed == num_lines
    assert done.output_file_id is not None
    return client.files.content(done.output_file_id).content
