"""Objects whose writer never got to mention them are found and deleted; what anything refers to never is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, submission
from harness.operations import create, forward_backward, load, optim_step, save
from harness.worker import WorkerRig
from twinkle.core.lease import Lease
from twinkle.scheduler.retention import Retention
from twinkle.storage.blobs import BlobStore, FolderStore, day_of
from twinkle.storage.checkpoints.checkpoints import NewCopy
from twinkle.storage.payloads import write_payload, write_result
from twinkle.storage.upkeep import waste as waste_module

DAY_S = 86_400.0
KEEP = Retention(keep_s=1e9, every_ops=4, max_snapshots=8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def objects(root: Path) -> FolderStore:
    return FolderStore(root)


@pytest.fixture
def worker(bench: Bench, objects: FolderStore, clock: HandClock) -> Iterator[WorkerRig]:
    worker = WorkerRig(
        "w",
        stores=bench.stores,
        blobs=objects,
        clock=clock,
        snapshot_every_ops=4,
        retention=KEEP,
        lease_s=1e9,
    )
    yield worker
    worker.bury()


def swept(bench: Bench, clock: HandClock, blobs: BlobStore) -> int:
    waste = bench.stores.waste
    found = [blob for page in waste.orphans(blobs, older_than_days=2) for blob in page]
    waste.give_up(found)
    return len(found)


def delete_what_is_given_up(bench: Bench, clock: HandClock, blobs: BlobStore) -> None:
    clock.move(10.0)
    bench.stores.waste.delete(blobs, older_than_s=10.0)


def all_keys(blobs: BlobStore) -> list[str]:
    return [blob.key for blob in blobs.scan(after="", limit=10_000)]


def test_what_nothing_refers_to_goes_when_its_day_is_long_over(
    bench: Bench, clock: HandClock, objects: FolderStore
) -> None:
    now = clock.now()
    write_payload(objects, "a:req:1", b"refused for its tenant's quota", inline_bytes=1, now=now)
    write_result(objects, "a:req:1", b"computed without a lease", inline_bytes=1, now=now)
    for kind in ("checkpoints", "snapshots"):
        objects.put(f"{kind}/{day_of(now)}/s/train/0/weights/x/7/abc/adapter.safetensors", b"never committed")
    (torn,) = {f"results/{day_of(now)}/a/.b.0123"}
    objects.put(torn, b"half a fi")

    counts = []
    for _ in range(3):
        counts.append(swept(bench, clock, objects))
        clock.move(DAY_S)
    delete_what_is_given_up(bench, clock, objects)

    assert counts == [0, 0, 5]
    assert all_keys(objects) == []


def test_what_a_run_its_checkpoints_and_its_copies_are_made_of_stays(
    bench: Bench, worker: WorkerRig, clock: HandClock, objects: FolderStore
) -> None:
    bench.adapter("a")
    run = [create(), save("x"), *(request for step in range(4) for request in (forward_backward(step), optim_step()))]
    run += [save("y"), load("x", with_optimizer=True)]
    bench.append(*(request.numbered("a", seq) for seq, request in enumerate(run) if seq > 0))
    worker.drain()
    worker.save_all()
    new = NewCopy(
        source="tinker://a/weights/x", tenant="t0", session="session-t0", adapter="session-t0:train:9", expires_at=None
    )
    bench.checkpoints.copy(new)
    bench.checkpoints.delete("t0", "tinker://a/weights/x")
    before = all_keys(objects)
    assert {key.split("/")[0] for key in before} == {"checkpoints", "snapshots"}
    clock.move(3 * DAY_S)

    assert swept(bench, clock, objects) == 0
    delete_what_is_given_up(bench, clock, objects)
    assert all_keys(objects) == before


def test_large_payloads_and_results_of_operations_stay(
    bench: Bench, lease: Lease, clock: HandClock, objects: FolderStore
) -> None:
    bench.created(lease, "a")
    payload = write_payload(objects, "a:req:1", b"a large batch", inline_bytes=1, now=clock.now())
    bench.append(replace(submission("a", 1), payload=payload))
    (claim,) = bench.claim(lease)
    result = write_result(objects, claim.request_id, b"large logprobs", inline_bytes=1, now=clock.now())
    bench.journal.commit(lease, [replace(done(claim), result=result)])
    clock.move(3 * DAY_S)

    assert swept(bench, clock, objects) == 0
    delete_what_is_given_up(bench, clock, objects)
    assert len(all_keys(objects)) == 2


def test_a_resend_after_the_sweep_has_a_blob_of_its_own(
    bench: Bench, lease: Lease, clock: HandClock, objects: FolderStore
) -> None:
    bench.created(lease, "a")
    write_payload(objects, "a:req:1", b"refused at first", inline_bytes=1, now=clock.now())
    clock.move(3 * DAY_S)
    assert swept(bench, clock, objects) == 1

    payload = write_payload(objects, "a:req:1", b"refused at first", inline_bytes=1, now=clock.now())
    bench.append(replace(submission("a", 1), payload=payload))
    delete_what_is_given_up(bench, clock, objects)

    assert all_keys(objects) == [payload.blob]


def test_what_is_not_ours_is_left_alone(bench: Bench, clock: HandClock, objects: FolderStore) -> None:
    for key in ("backup/2020-01-01/x", "payloads", "notes.txt", "models/weights"):
        objects.put(key, b"x")

    assert swept(bench, clock, objects) == 0


def test_every_page_of_a_large_store_is_looked_at(
    bench: Bench, clock: HandClock, objects: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waste_module, "_PAGE", 3)
    for seq in range(7):
        write_result(objects, f"a:req:{seq}", b"xx", inline_bytes=1, now=clock.now())
    clock.move(3 * DAY_S)

    pages = list(bench.stores.waste.orphans(objects, older_than_days=2))

    assert [[blob.size_bytes for blob in page] for page in pages] == [[2, 2, 2], [2, 2, 2], [2]]
