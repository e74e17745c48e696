"""Where the servers of the tests keep their data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness import servers


@pytest.mark.parametrize(
    ("free", "available", "is_in_memory"), [(2**40, 2**40, True), (2**20, 2**40, False), (2**40, 2**20, False)]
)
def test_a_postgresql_is_in_memory_where_there_is_room(
    free: int, available: int, is_in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(servers, "_MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(servers.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))

    with servers.postgres_folder() as folder:
        assert folder.parent.parent == (memory if is_in_memory else disk)
        assert folder.parent.is_dir()
    assert not folder.parent.exists()


def test_without_a_place_in_memory_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with servers.postgres_folder() as folder:
        assert folder.parent.parent == tmp_path
