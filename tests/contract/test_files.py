"""Files, uploads and prepared rows in the journal: shared within a tenant, bounded, ended; on both databases."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.clock import HandClock
from harness.journal import Bench
from harness.polling import wait_until
from twinkle.core.errors import Conflict, InvalidInput, LimitReached, NotFound
from twinkle.storage.blobs import FILES, PREPARED, FolderStore
from twinkle.storage.files import uploads
from twinkle.storage.files.contents import insert_file
from twinkle.storage.files.prepared import NewPreparedData, shard_key
from twinkle.storage.files.records import (
    ContentFacts,
    FilePiece,
    FileStatus,
    NewFile,
    NewPart,
    NewUpload,
    StoredFile,
    UploadStatus,
)

HOUR_S = 3600.0
GRACE_S = 100.0


@pytest.fixture
def blobs(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Keeper:
    """Writes pieces and names them, as the API does."""

    def __init__(self, bench: Bench, blobs: FolderStore) -> None:
        self.stores = bench.stores
        self.blobs = blobs
        self._num_pieces = 0

    def pieces(self, *datas: bytes) -> tuple[FilePiece, ...]:
        made = []
        for data in datas:
            self._num_pieces += 1
            self.blobs.put(key := f"{FILES}1970-01-01/{self._num_pieces}", data)
            made.append(FilePiece(key=key, size_bytes=len(data)))
        return tuple(made)

    def add(self, data: bytes, tenant: str = "t0", max_bytes: int = 0, **facts: object) -> StoredFile:
        new = NewFile(tenant=tenant, purpose="fine-tune", name="a.jsonl", **facts)  # type: ignore[arg-type]
        told = ContentFacts(sha256=_sha(data), size_bytes=len(data), num_lines=1)
        return self.stores.files.add(new, told, self.pieces(data), max_bytes=max_bytes)

    def begin(self, data: bytes, tenant: str = "t0", max_bytes: int = 0) -> str:
        new = NewUpload(tenant=tenant, purpose="fine-tune", name="a.jsonl", size_bytes=len(data), sha256=_sha(data))
        return self.stores.uploads.begin(new, ttl_s=HOUR_S, max_bytes=max_bytes).id

    def part(self, upload: str, *datas: bytes, number: int | None = None, tenant: str = "t0") -> str:
        part = NewPart(sha256=_sha(b"".join(datas)), pieces=self.pieces(*datas), number=number)
        return self.stores.uploads.add_part(upload, tenant, part, ttl_s=HOUR_S).id

    def complete(self, upload: str, parts: Sequence[str], tenant: str = "t0") -> StoredFile:
        pieces = self.stores.uploads.pieces(self.stores.uploads.find(upload, tenant), parts)
        data = b"".join(self.blobs.get(piece.key) for piece in pieces)
        facts = ContentFacts(sha256=_sha(data), size_bytes=len(data))
        return self.stores.uploads.complete(upload, tenant, parts, facts)

    def read(self, file: StoredFile) -> bytes:
        return b"".join(self.blobs.get(piece.key) for piece in self.stores.files.pieces(file))

    def left(self, clock: HandClock) -> int:
        """How many blobs are there when housekeeping has deleted what was given up."""
        clock.move(GRACE_S)
        self.stores.waste.delete(self.blobs, older_than_s=GRACE_S)
        return len(self.blobs.scan(after="", limit=1000))


@pytest.fixture
def keeper(bench: Bench, blobs: FolderStore) -> Keeper:
    return Keeper(bench, blobs)


def test_a_tenant_has_the_same_bytes_once_and_another_tenant_has_its_own(keeper: Keeper, clock: HandClock) -> None:
    first, again, other = keeper.add(b"x" * 10), keeper.add(b"x" * 10), keeper.add(b"x" * 10, tenant="t1")

    files = keeper.stores.files
    assert first.content == again.content != other.content
    assert (first.status, first.num_lines) == (FileStatus.PROCESSED, 1)
    assert (files.taken_bytes("t0"), files.taken_bytes("t1")) == (10, 10)
    assert keeper.left(clock) == 2
    files.delete(first.id, "t0")
    assert keeper.read(again) == b"x" * 10
    files.delete(again.id, "t0")
    assert keeper.left(clock) == 1
    assert files.taken_bytes("t0") == 0
    with pytest.raises(NotFound):
        files.delete(other.id, "t0")
    with pytest.raises(NotFound):
        files.find(first.id, "t0")


def test_a_file_is_found_and_read_while_somebody_else_writes(keeper: Keeper) -> None:
    file = keeper.add(b"content")
    files = keeper.stores.files

    with ThreadPoolExecutor(1) as reader, keeper.stores.database.transaction() as writing:
        writing.execute("UPDATE tenant SET weight = 2 WHERE id = 't1'")
        found = reader.submit(files.find, file.id, "t0").result(timeout=5)
        pieces = reader.submit(files.pieces, file).result(timeout=5)
        known = reader.submit(files.known, "t0", _sha(b"content")).result(timeout=5)

    assert (found, [piece.size_bytes for piece in pieces]) == (file, [7])
    assert known is not None and known.num_lines == 1


def test_bytes_that_a_tenant_has_need_not_be_sent_again(keeper: Keeper) -> None:
    file = keeper.add(b"content")
    new = NewFile(tenant="t0", purpose="batch", name="b.jsonl")

    files = keeper.stores.files
    adopted = files.adopt(new, sha256=_sha(b"content"), size_bytes=7)

    assert adopted is not None
    assert (adopted.content, adopted.purpose, adopted.num_lines) == (file.content, "batch", 1)
    stranger = NewFile(tenant="t1", purpose="batch", name="b.jsonl")
    assert files.adopt(stranger, sha256=_sha(b"content"), size_bytes=7) is None
    assert files.adopt(NewFile(tenant="t0", purpose="batch", name="c"), sha256=_sha(b"content"), size_bytes=8) is None


def test_a_file_of_a_chosen_id_is_written_once(keeper: Keeper, clock: HandClock) -> None:
    first = keeper.add(b"results", id="file-of-a-job")
    again = keeper.add(b"results", id="file-of-a-job")

    assert first == again
    assert keeper.left(clock) == 1
    assert keeper.read(first) == b"results"


def test_what_a_failed_answer_has_kept_is_not_deleted_by_the_next_attempt(keeper: Keeper, clock: HandClock) -> None:
    new = NewFile(tenant="t0", purpose="batch_output", name="out.jsonl")
    facts, pieces = ContentFacts(sha256=_sha(b"abc"), size_bytes=3), keeper.pieces(b"abc")

    # As if the database had committed and its answer been lost.
    file = keeper.stores.files.add(new, facts, pieces)
    keeper.stores.files.add(new, facts, pieces)

    assert keeper.left(clock) == 1
    assert keeper.read(file) == b"abc"


def test_lists_go_by_age_and_are_cut_into_pages(keeper: Keeper, clock: HandClock) -> None:
    made = []
    for number in range(5):
        clock.move(1)
        made.append(keeper.add(b"x" * (number + 1)).id)
    keeper.add(b"strange", tenant="t1")

    def ids(**options: object) -> list[str]:
        return [file.id for file in keeper.stores.files.page("t0", **options)]  # type: ignore[arg-type]

    assert ids(limit=10) == made[::-1]
    assert ids(limit=10, order="asc", after=made[1]) == made[2:]
    assert ids(limit=2, after=made[3]) == [made[2], made[1]]
    assert ids(limit=10, purpose="batch") == []
    with pytest.raises(NotFound):
        ids(limit=10, after="file-none")


def test_an_upload_is_put_together_of_the_parts_that_are_named(keeper: Keeper, clock: HandClock) -> None:
    upload = keeper.begin(b"abcdefgh")
    second, twice, first = keeper.part(upload, b"gh"), keeper.part(upload, b"gh"), keeper.part(upload, b"abc", b"def")

    with pytest.raises(InvalidInput, match="2 bytes together, 8 were announced"):
        keeper.complete(upload, [second])
    with pytest.raises(InvalidInput, match="twice"):
        keeper.complete(upload, [second, second, first])
    file = keeper.complete(upload, [first, second])

    assert keeper.read(file) == b"abcdefgh"
    assert file.status is FileStatus.UPLOADED
    assert keeper.stores.uploads.complete(upload, "t0", [], ContentFacts(sha256="", size_bytes=0)) == file
    assert twice
    assert keeper.left(clock) == 3
    with pytest.raises(Conflict, match="is completed"):
        keeper.part(upload, b"x")
    with pytest.raises(Conflict, match="delete file"):
        keeper.stores.uploads.cancel(upload, "t0")


def test_a_numbered_part_comes_once_and_a_broken_upload_is_found_by_its_bytes(keeper: Keeper, clock: HandClock) -> None:
    data = b"abcd"
    upload = keeper.begin(data)
    first = keeper.part(upload, b"ab", number=0)

    like = NewUpload(tenant="t0", purpose="fine-tune", name="a.jsonl", size_bytes=4, sha256=_sha(data))
    found = keeper.stores.uploads.resumable(like)
    again = keeper.part(upload, b"ab", number=0)
    second = keeper.part(upload, b"cd", number=1)

    assert found is not None
    assert (found.id, again) == (upload, first)
    assert [part.number for part in keeper.stores.uploads.parts(found.id)] == [0, 1]
    with pytest.raises(Conflict, match="has other bytes"):
        keeper.part(upload, b"xx", number=0)
    assert keeper.read(keeper.complete(upload, [first, second])) == data
    assert keeper.left(clock) == 2
    assert keeper.stores.uploads.resumable(like) is None


def test_an_upload_takes_no_more_than_was_announced_and_is_its_tenants_alone(keeper: Keeper) -> None:
    upload = keeper.begin(b"abcd")
    keeper.part(upload, b"abc", number=0)

    with pytest.raises(InvalidInput, match="makes the upload 5 bytes long, 4 were announced"):
        keeper.part(upload, b"de", number=1)
    with pytest.raises(NotFound):
        keeper.part(upload, b"d", number=1, tenant="t1")
    with pytest.raises(NotFound):
        keeper.stores.uploads.find(upload, "t1")
    with pytest.raises(NotFound):
        keeper.stores.uploads.cancel(upload, "t1")


def test_an_upload_that_is_completed_as_its_time_ends_keeps_its_bytes(
    bench: Bench, keeper: Keeper, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"abcd"
    upload = keeper.begin(data)
    part = keeper.part(upload, data)
    with ThreadPoolExecutor(2) as others:
        sweeps: list[Future[int]] = []

        def named_late(*args: Any, **facts: Any) -> None:
            clock.move(HOUR_S)
            sweeps.append(others.submit(keeper.stores.uploads.expire))
            if bench.database.is_postgres:
                wait_until(
                    lambda: others.submit(_waits_for_a_row, bench).result() or sweeps[0].done(),
                    what="the sweep at our row",
                )
            insert_file(*args, **facts)

        monkeypatch.setattr(uploads, "insert_file", named_late)
        file = keeper.complete(upload, [part])
        sweeps[0].result()

    assert keeper.read(file) == data
    assert bench.rows("SELECT key FROM doomed_blob") == []
    assert keeper.stores.uploads.find(upload, "t0").status is UploadStatus.COMPLETED


def _waits_for_a_row(bench: Bench) -> bool:
    locked = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return bool(bench.database.read(locked))


def test_an_upload_that_nobody_goes_on_with_ends(keeper: Keeper, clock: HandClock) -> None:
    upload, cancelled = keeper.begin(b"abcd"), keeper.begin(b"efgh")
    keeper.part(upload, b"ab")
    keeper.part(cancelled, b"ef")

    keeper.stores.uploads.cancel(cancelled, "t0")
    assert keeper.stores.uploads.cancel(cancelled, "t0").status is UploadStatus.CANCELLED
    clock.move(HOUR_S - 1)
    assert keeper.stores.uploads.expire() == 0
    keeper.part(upload, b"cd")
    clock.move(HOUR_S)

    assert keeper.stores.uploads.expire() == 1
    assert keeper.stores.uploads.find(upload, "t0").status is UploadStatus.EXPIRED
    assert keeper.stores.files.taken_bytes("t0") == 0
    assert keeper.left(clock) == 0
    clock.move(30 * 24 * HOUR_S)
    keeper.stores.uploads.expire()
    with pytest.raises(NotFound):
        keeper.stores.uploads.find(upload, "t0")


def test_files_end_when_their_time_has_come(keeper: Keeper, clock: HandClock) -> None:
    lasting = keeper.add(b"same")
    ending = keeper.add(b"same", expires_at=clock.now() + 5)
    keeper.add(b"other", expires_at=clock.now() + 5)
    clock.move(5)

    with pytest.raises(NotFound):
        keeper.stores.files.find(ending.id, "t0")
    assert keeper.stores.files.expire() == 2
    assert keeper.left(clock) == 1
    assert keeper.read(lasting) == b"same"


def test_a_tenant_keeps_no_more_than_it_may(keeper: Keeper, clock: HandClock) -> None:
    keeper.add(b"x" * 60, max_bytes=100)

    with pytest.raises(LimitReached, match="take up 60 bytes, 41 more are too many: 100 may be"):
        keeper.add(b"y" * 41, max_bytes=100)
    with pytest.raises(LimitReached):
        keeper.begin(b"y" * 41, max_bytes=100)
    upload = keeper.begin(b"y" * 40, max_bytes=100)
    keeper.part(upload, b"y" * 40)
    with pytest.raises(LimitReached, match="take up 100 bytes"):
        keeper.add(b"z", max_bytes=100)
    # What it has already costs nothing more.
    keeper.add(b"x" * 60, max_bytes=100)
    keeper.add(b"z" * 200, tenant="t1", max_bytes=200)

    assert keeper.left(clock) == 3


def test_blobs_of_files_and_prepared_rows_are_no_orphans(
    keeper: Keeper, bench: Bench, blobs: FolderStore, clock: HandClock
) -> None:
    keeper.add(b"kept")
    keeper.part(keeper.begin(b"part"), b"part")
    _prepare(keeper, "x")
    for key in (f"{FILES}1970-01-01/lost", f"{PREPARED}1970-01-01/lost/000000"):
        blobs.put(key, b"lost")
    clock.move(5 * 24 * HOUR_S)

    found = [blob.key for page in bench.stores.waste.orphans(blobs, older_than_days=2) for blob in page]

    assert found == [f"{FILES}1970-01-01/lost", f"{PREPARED}1970-01-01/lost/000000"]


def _prepare(keeper: Keeper, digest: str, *, tenant: str = "t0", max_bytes: int = 0, folder: str = "a") -> str:
    folder = f"{PREPARED}1970-01-01/{digest}-{tenant}-{folder}"
    for number in range(2):
        keeper.blobs.put(shard_key(folder, number), b"rows")
    new = NewPreparedData(
        tenant=tenant, digest=digest, folder=folder, num_shards=2, size_bytes=8, description=f'"{folder}"'
    )
    return keeper.stores.prepared_rows.add(new, max_bytes=max_bytes)


def test_prepared_rows_are_found_by_what_they_were_made_of_until_nobody_asks(keeper: Keeper, clock: HandClock) -> None:
    rows = keeper.stores.prepared_rows
    made, later = _prepare(keeper, "x"), _prepare(keeper, "x", folder="b")

    assert made == later == rows.find("t0", "x")
    assert rows.find("t1", "x") is None
    assert keeper.left(clock) == 2
    assert keeper.stores.files.taken_bytes("t0") == 8
    with pytest.raises(LimitReached):
        _prepare(keeper, "y", max_bytes=10)
    clock.move(HOUR_S)
    rows.find("t0", "x")
    clock.move(HOUR_S)
    assert rows.expire(idle_s=HOUR_S + 1) == 0
    clock.move(2)
    assert rows.expire(idle_s=HOUR_S + 1) == 1
    assert rows.find("t0", "x") is None
    assert keeper.left(clock) == 0


def test_files_are_in_their_tenants_account_by_the_hour(keeper: Keeper, bench: Bench, clock: HandClock) -> None:
    began = clock.now()
    file = keeper.add(b"x" * 1000)
    keeper.add(b"x" * 1000)
    keeper.add(b"x" * 5000, tenant="t1")
    assert bench.stores.accounting.file_bytes_by_tenant() == {"t0": 1000, "t1": 5000}
    clock.move(2 * HOUR_S)
    for one in keeper.stores.files.page("t0", limit=10):
        keeper.stores.files.delete(one.id, "t0")
    clock.move(HOUR_S)

    hours = bench.stores.accounting.file_gigabyte_hours("t0", start=0, end=int(clock.now()) + 1)

    assert file.created_at == began
    # Two names, one content, two hours.
    assert sum(hours.values()) == pytest.approx(2 * 1000 / 1e9)
    assert bench.stores.accounting.file_bytes_by_tenant() == {"t1": 5000}
