"""Real neighbours for the tests: a redis-server, a PostgreSQL, an S3 server."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import boto3
import pytest
from hypothesis import settings
from moto.server import ThreadedMotoServer

from harness.servers import PostgresServer, RedisServer, create_database, postgres_folder
from twinkle.storage.schema import upgrade

pytest_plugins = [
    "harness.surroundings",
    "harness.limits",
    "harness.leftovers",
    "harness.collecting",
    "harness.together",
    "harness.trust",
]
# Examples are drawn on machines of which others take most.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
# Several processes run tests at once, and start services with engines: more threads than cores make all of them slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test wants several: a thread that spins while it waits takes the core from the one it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# They compile our sources once, not each of them again, also where the environment asks for no files of bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What tests look up on hubs neither finds what a user of this machine has, nor leaves anything there.
_caches = tempfile.TemporaryDirectory(prefix="twinkle-hubs-")
os.environ.setdefault("MODELSCOPE_CACHE", f"{_caches.name}/modelscope")
os.environ.setdefault("HF_HOME", f"{_caches.name}/huggingface")

MakeDatabaseUrl = Callable[[str], str]
_BUCKET = "twinkle-tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reversed", action="store_true", help="run the last test first: none may need one before it")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--reversed"):
        items.reverse()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real redis-server behind a password, for the whole run."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.kill()


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """A real PostgreSQL for the whole run, on a Unix socket. Started by the first test that asks."""
    with postgres_folder() as folder:
        server = PostgresServer(folder)
        server.cut_no_power()
        try:
            yield server.url
        finally:
            server.close()


@pytest.fixture(scope="session")
def make_empty_database_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> MakeDatabaseUrl:
    """The URL of a new, empty database: ``make_empty_database_url("sqlite")`` or ``("postgres")``."""

    def make(kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'journal.db'}"
        return create_database(request.getfixturevalue("postgres_server_url"))

    return make


@pytest.fixture(scope="session")
def make_migrated_url(make_empty_database_url: MakeDatabaseUrl) -> MakeDatabaseUrl:
    """The URL of the one database of its kind with the current schema that is copied and never touched."""

    @cache
    def make(kind: str) -> str:
        url = make_empty_database_url(kind)
        upgrade(url)
        return url

    return make


@pytest.fixture(scope="session")
def copy_database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeDatabaseUrl:
    """The URL of a copy of a database, which nobody may be connected to: ``copy_database(url)``."""

    def copy(url: str) -> str:
        if url.startswith("sqlite:"):
            path = tmp_path_factory.mktemp("sqlite") / "journal.db"
            shutil.copy(url.removeprefix("sqlite:///"), path)
            return f"sqlite:///{path}"
        return create_database(request.getfixturevalue("postgres_server_url"), template=url)

    return copy


@pytest.fixture(scope="session")
def make_database_url(make_migrated_url: MakeDatabaseUrl, copy_database: MakeDatabaseUrl) -> MakeDatabaseUrl:
    """The URL of a new database with the current schema, a copy: to migrate each takes longer than most tests do."""
    return lambda kind: copy_database(make_migrated_url(kind))


@pytest.fixture
def sqlite_url(make_migrated_url: MakeDatabaseUrl, tmp_path: Path) -> str:
    """A new SQLite database with the current schema, which goes with its test: there are many."""
    path = tmp_path / "journal.db"
    shutil.copy(make_migrated_url("sqlite").removeprefix("sqlite:///"), path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server with an empty bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    credentials = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **credentials)
    client.create_bucket(Bucket=_BUCKET)
    yield endpoint
    server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty folder of the S3 server's bucket, with the environment in which it is found."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://{_BUCKET}/{uuid.uuid4().hex}"
