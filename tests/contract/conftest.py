"""A furnished journal on each database, and each object store, empty."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from harness.clock import HandClock
from harness.journal import Bench
from harness.worker import BreakableBlobs, MakeWorker, WorkerRig
from twinkle.core.lease import Lease
from twinkle.storage.blobs import BlobStore, FolderStore, ObjectStore
from twinkle.storage.database import sql_engine
from twinkle.storage.schema import upgrade


@pytest.fixture(scope="session")
def migrated_postgres_url(make_database_url: Callable[[str], str], postgres_server_url: str) -> str:
    """A PostgreSQL database with the current schema, to be copied and never touched."""
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        # No test cuts the power.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    return _upgraded(make_database_url("postgres"))


@pytest.fixture(scope="session")
def migrated_sqlite_url(make_database_url: Callable[[str], str]) -> str:
    """A SQLite database with the current schema, to be copied and never touched."""
    return _upgraded(make_database_url("sqlite"))


@pytest.fixture
def postgres_url(migrated_postgres_url: str, postgres_server_url: str) -> Iterator[str]:
    """A new PostgreSQL database with the current schema."""
    name = f"test_{uuid.uuid4().hex}"
    template = migrated_postgres_url.partition("?")[0].rpartition("/")[2]
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    yield migrated_postgres_url.replace(template, name)
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def sqlite_url(migrated_sqlite_url: str, tmp_path: Path) -> str:
    """A new SQLite database with the current schema."""
    path = tmp_path / "journal.db"
    shutil.copy(migrated_sqlite_url.removeprefix("sqlite:///"), path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Both databases, one after the other, each new and with the current schema."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def bench(database_url: str, clock: HandClock) -> Iterator[Bench]:
    bench = Bench(database_url, clock)
    yield bench
    bench.close()


@pytest.fixture
def lease(bench: Bench) -> Lease:
    return bench.lease()


@pytest.fixture
def store(tmp_path: Path) -> BreakableBlobs:
    return BreakableBlobs(FolderStore(tmp_path / "objects"))


@pytest.fixture
def make_worker(bench: Bench, store: BreakableBlobs, clock: HandClock) -> Iterator[MakeWorker]:
    """Workers one after the other on one journal; each takes the mesh, whoever had it."""
    workers: list[WorkerRig] = []

    def make(**options: Any) -> WorkerRig:
        clock.move(1000)
        name = f"worker{len(workers)}"
        worker = WorkerRig(name, stores=bench.stores, blobs=store, clock=clock, **options)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.bury()


@pytest.fixture(params=["folder", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """Both object stores, one after the other, each empty."""
    if request.param == "folder":
        return FolderStore(tmp_path / "objects")
    return ObjectStore(request.getfixturevalue("s3_url"))


def _upgraded(url: str) -> str:
    engine = sql_engine(url)
    upgrade(engine)
    engine.dispose()
    return url
