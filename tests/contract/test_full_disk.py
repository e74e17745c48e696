"""A small file system that is full to its last byte: the journal opens, is read, deleted from and shrunk."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench, new_sampler
from harness.operations import forward_backward, optim_step, sample_body, submit_run
from harness.worker import MakeWorker
from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import OperationKind, OperationState, Payload, Submission
from twinkle.core.settings import Settings
from twinkle.server.app import prepare_database
from twinkle.storage.disks import BALLAST, Disks
from twinkle.storage.sql_engine import sql_engine
from twinkle.storage.stores import Stores
from twinkle.storage.tenants.sessions import NewSession
from twinkle.storage.upkeep.vacuum import vacuum


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB, where one may be mounted."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(tmp_path)], capture_output=True, check=False, timeout=10
    )
    if mounted.returncode != 0:
        pytest.skip("nothing may be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True, timeout=10)


def _fill(folder: Path) -> None:
    pages = iter(lambda: bytes(4096), None)
    with (folder / "others").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(pages)


def test_a_journal_on_a_full_disk_opens_is_read_deleted_from_and_shrunk(small_disk: Path) -> None:
    home = small_disk / "home"
    settings = Settings(home=home, redis_url="redis://nowhere", disk_low_bytes=2**20, disk_critical_bytes=0)
    prepare_database(settings)
    stores = Stores.at(settings.resolved_database_url, SystemClock())
    key = stores.tenants.key(stores.tenants.create_key("a", "test"))
    assert key is not None
    for _ in range(50):
        stores.sessions.open(key.tenant, NewSession(tags=["a" * 4000] * 4))
    stores.close()
    _fill(small_disk)
    with pytest.raises(StorageUnavailable):
        stores.tenants.all()

    prepare_database(settings)
    told = [account.name for account in stores.tenants.all()]
    deleted = stores.sessions.forget(older_than_s=-1)
    before = settings.journal_file.stat().st_size
    engine = sql_engine(stores.database.url)
    vacuumed = vacuum(engine)
    engine.dispose()
    stores.close()

    assert (told, deleted) == (["a"], 50)
    assert (vacuumed.before_bytes, vacuumed.after_bytes) == (before, settings.journal_file.stat().st_size)
    assert vacuumed.after_bytes < before
    assert not (home / BALLAST).exists()
    assert shutil.disk_usage(home).free > 2**20


def test_what_deleted_rows_took_is_given_back(bench: Bench) -> None:
    tenant = bench.stores.tenants.key(bench.stores.tenants.create_key("a", "test"))
    assert tenant is not None
    for _ in range(40):
        # What does not compress.
        tags = [secrets.token_hex(2000) for _ in range(4)]
        bench.stores.sessions.open(tenant.tenant, NewSession(tags=tags))
    bench.clock.move(10)
    assert bench.stores.sessions.forget(older_than_s=1) >= 40

    vacuumed = vacuum(bench.engine)

    assert vacuumed.after_bytes <= vacuumed.before_bytes - 40 * 16_000


def test_a_worker_begins_nothing_on_a_full_disk_and_goes_on_when_there_is_room(
    bench: Bench, make_worker: MakeWorker, clock: HandClock, tmp_path: Path
) -> None:
    free_bytes = 10
    disks = Disks([tmp_path], clock, low_bytes=100, critical_bytes=50, free=lambda _: free_bytes)
    worker = make_worker(disks=disks)
    run = submit_run(bench, forward_backward(1), optim_step())
    bench.journal.open_lane(new_sampler("s"))
    payload = Payload(inline=sample_body("s", 1))
    bench.append(Submission(tenant="t0", lane="s", seq=1, kind=OperationKind.SAMPLE, digest="d", payload=payload))

    worker.drain()
    waiting = [*(bench.status("a", seq).state for seq in range(len(run))), bench.status("s", 1).state]
    free_bytes = 60
    clock.move(1.1)
    worker.drain()
    done = [*(bench.status("a", seq).state for seq in range(len(run))), bench.status("s", 1).state]

    assert set(waiting) == {OperationState.QUEUED}
    assert set(done) == {OperationState.DONE}
