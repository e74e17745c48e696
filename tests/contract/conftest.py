"""A furnished journal on each database, and each object store, empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench
from harness.servers import drop_database
from harness.worker import BreakableBlobs, MakeWorker, workers_in_turn
from twinkle.core.lease import Lease
from twinkle.storage.blobs import BlobStore, FolderStore, ObjectStore


@pytest.fixture
def postgres_url(make_database_url: Callable[[str], str], postgres_server_url: str) -> Iterator[str]:
    """A new PostgreSQL database with the current schema."""
    url = make_database_url("postgres")
    yield url
    drop_database(postgres_server_url, url)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Both databases, one after the other, each new and with the current schema."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def module_url(request: pytest.FixtureRequest, make_database_url: Callable[[str], str]) -> Iterator[str]:
    """Both databases, one after the other, each for a whole file: what is dear to fill is filled once."""
    url = make_database_url(request.param)
    yield url
    if request.param == "postgres":
        drop_database(request.getfixturevalue("postgres_server_url"), url)


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
    with workers_in_turn(bench.stores, store, clock) as make:
        yield make


@pytest.fixture(params=["folder", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """Both object stores, one after the other, each empty."""
    if request.param == "folder":
        return FolderStore(tmp_path / "objects")
    return ObjectStore(request.getfixturevalue("s3_url"))


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """A clerk's thread, as in the service."""
    with ThreadPoolExecutor(1) as executor:
        yield executor
