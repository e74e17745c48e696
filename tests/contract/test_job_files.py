"""Files as jobs read and write them, on both databases: the same bytes under the same id, whatever was killed."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench
from twinkle.core.job import Job, JobFailed, JobKind, JobState, NewJob
from twinkle.jobs.stored_files import StoredFiles
from twinkle.storage.blobs import FILES, FolderStore
from twinkle.storage.files.records import ContentFacts, FilePiece, FileStatus, NewFile


@pytest.fixture
def blobs(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


def _job(bench: Bench, job_id: str = "job-1", tenant: str = "t0") -> Job:
    return bench.stores.jobs.create(NewJob(id=job_id, tenant=tenant, kind=JobKind.BATCH, spec={}, digest="d"))


def _upload(bench: Bench, blobs: FolderStore, *datas: bytes) -> str:
    pieces = []
    for number, data in enumerate(datas):
        blobs.put(key := f"{FILES}1970-01-01/in/{number}", data)
        pieces.append(FilePiece(key=key, size_bytes=len(data)))
    whole = b"".join(datas)
    facts = ContentFacts(sha256=hashlib.sha256(whole).hexdigest(), size_bytes=len(whole))
    new = NewFile(tenant="t0", purpose="batch", name="in.jsonl")
    return bench.stores.files.add(new, facts, pieces).id


def _num_blobs(bench: Bench, blobs: FolderStore, clock: HandClock) -> int:
    clock.move(100)
    bench.stores.waste.delete(blobs, older_than_s=100)
    return len(blobs.scan(after="", limit=1000))


async def _lines(files: StoredFiles, file_id: str, start: int) -> list[bytes]:
    return [line async for line in files.lines(file_id, start=start)]


def test_a_file_is_read_line_by_line_from_any_line_on(bench: Bench, blobs: FolderStore, clock: HandClock) -> None:
    file_id = _upload(bench, blobs, b"one\ntw", b"o\r\n\nfo", b"ur")
    mine = StoredFiles(_job(bench), bench.stores, blobs, clock)
    strange = StoredFiles(_job(bench, "job-2", "t1"), bench.stores, blobs, clock)

    assert asyncio.run(_lines(mine, file_id, 0)) == [b"one", b"two", b"", b"four"]
    assert asyncio.run(_lines(mine, file_id, 2)) == [b"", b"four"]
    assert asyncio.run(mine.read(file_id)) == b"one\ntwo\r\n\nfour"
    with pytest.raises(JobFailed) as refused:
        asyncio.run(strange.read(file_id))
    assert refused.value.failure.code == "file_not_found"
    assert not refused.value.failure.is_transient


def test_what_a_job_writes_is_one_file_whoever_writes_it(bench: Bench, blobs: FolderStore, clock: HandClock) -> None:
    job = _job(bench)
    first, second = (StoredFiles(job, bench.stores, blobs, clock) for _ in range(2))

    made = asyncio.run(first.write("results.jsonl", b"{}\n{}\n", purpose="batch_output"))
    again = asyncio.run(second.write("results.jsonl", b"{}\n{}\n", purpose="batch_output"))
    other = asyncio.run(second.write("errors.jsonl", b"{}\n{}\n", purpose="batch_output"))

    assert made == again != other
    file = bench.stores.files.find(made, "t0")
    assert (file.name, file.status, file.num_lines) == ("results.jsonl", FileStatus.PROCESSED, 2)
    assert asyncio.run(first.read(made)) == b"{}\n{}\n"
    assert _num_blobs(bench, blobs, clock) == 1


def test_parts_that_a_lost_runner_wrote_are_joined_by_another(
    bench: Bench, blobs: FolderStore, clock: HandClock
) -> None:
    job = _job(bench)
    first, second = (StoredFiles(job, bench.stores, blobs, clock) for _ in range(2))

    asyncio.run(first.write_part("out", "a-0", b"one\n"))
    asyncio.run(first.write_part("out", "a-1", b"unsaved\n"))
    asyncio.run(second.write_part("out", "b-0", b"two\n"))
    asyncio.run(second.write_part("out", "b-0", b"two\n"))
    with pytest.raises(JobFailed, match="has other bytes"):
        asyncio.run(second.write_part("out", "b-0", b"three\n"))
    made = asyncio.run(second.join("out", ["a-0", "b-0"], purpose="batch_output", keep_s=60))
    asyncio.run(first.write_part("out", "a-2", b"too late\n"))
    again = asyncio.run(first.join("out", ["a-0", "b-0"], purpose="batch_output", keep_s=60))

    assert made == again
    assert asyncio.run(first.read(made)) == b"one\ntwo\n"
    assert bench.stores.files.taken_bytes("t0") == 8
    assert _num_blobs(bench, blobs, clock) == 2
    with pytest.raises(JobFailed, match="no file"):
        asyncio.run(second.read(made))


def test_parts_end_with_their_job_and_not_before(bench: Bench, blobs: FolderStore, clock: HandClock) -> None:
    files = StoredFiles(_job(bench), bench.stores, blobs, clock)
    asyncio.run(files.write_part("out", "a-0", b"one\n"))
    clock.move(30 * 24 * 3600)

    assert bench.stores.uploads.expire() == 0
    bench.stores.jobs.request_cancel("job-1", "t0")
    assert bench.stores.jobs.find("job-1", "t0").state is JobState.CANCELLED
    assert bench.stores.uploads.expire() == 1
    assert _num_blobs(bench, blobs, clock) == 0
    with pytest.raises(JobFailed, match="not there"):
        asyncio.run(files.join("out", ["a-0"], purpose="batch_output"))
