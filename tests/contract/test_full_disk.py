"""A small file system that is full to its last byte: the journal opens, is read, deleted from and shrunk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.settings import Settings
from twinkle.server.app import prepare_database
from twinkle.storage.ballast import BALLAST
from twinkle.storage.stores import Stores
from twinkle.storage.tenants.sessions import NewSession


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
    prepare_database(settings).dispose()
    stores = Stores.at(settings.resolved_database_url, SystemClock())
    key = stores.tenants.key(stores.tenants.create_key("a", "test"))
    assert key is not None
    for _ in range(50):
        stores.sessions.open(key.tenant, NewSession(tags=["a" * 4000] * 4))
    stores.close()
    _fill(small_disk)
    with pytest.raises(StorageUnavailable):
        stores.tenants.all()

    prepare_database(settings).dispose()
    told = [account.name for account in stores.tenants.all()]
    deleted = stores.sessions.forget(older_than_s=-1)
    before = settings.journal_file.stat().st_size
    with stores.engine.connect() as connection:
        connection.exec_driver_sql("VACUUM")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    stores.close()

    assert (told, deleted) == (["a"], 50)
    assert settings.journal_file.stat().st_size < before
    assert not (home / BALLAST).exists()
    assert shutil.disk_usage(home).free > 2**20
