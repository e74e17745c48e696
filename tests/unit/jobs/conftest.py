"""A runner of jobs against each database, with our own twin of a mesh worker behind the journal."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from harness.fake_worker import FakeWorker
from harness.job_plans import TEST_PLANS
from harness.jobs import JobRig, job_rig
from twinkle.core.settings import Settings


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def settings(
    request: pytest.FixtureRequest,
    redis_url: str,
    make_database_url: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Settings:
    """A service's settings, with its database ready."""
    return Settings(
        home=tmp_path_factory.mktemp("home"), database_url=make_database_url(request.param), redis_url=redis_url
    )


@pytest.fixture(scope="session")
def worker(settings: Settings) -> Iterator[FakeWorker]:
    """A worker that answers everything and computes nothing."""
    worker = FakeWorker(settings)
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture(scope="session")
def rig(settings: Settings, worker: FakeWorker) -> Iterator[JobRig]:
    """A runner with the tests' own plans."""
    with job_rig(settings, plans=TEST_PLANS) as rig:
        yield rig


@pytest.fixture
def tenant(rig: JobRig) -> str:
    """The id of a new tenant."""
    key = rig.stores.tenants.create_key(f"tenant-{secrets.token_hex(8)}", "test")
    found = rig.stores.tenants.key(key)
    assert found is not None
    return found.tenant
