"""The API under test: the real app on a real port, with our own twin of a worker behind the journal."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker
from fastapi import FastAPI

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL, FakeWorker
from harness.leftovers import sdk_client
from harness.victim import Victim, attacked
from twinkle.core.clock import Clock, SystemClock
from twinkle.core.settings import Settings
from twinkle.server.app import create_app
from twinkle.server.run import ApiServer
from twinkle.server.state import ServerState, state_of
from twinkle.storage.stores import Stores

_START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Api:
    """A served app, and the worker behind it."""

    url: str
    settings: Settings
    server: ApiServer
    app: FastAPI
    worker: FakeWorker
    stores: Stores

    def new_key(self) -> str:
        """The key of a tenant of its own."""
        return self.stores.tenants.create_key(f"tenant-{secrets.token_hex(8)}", "test")

    def state(self) -> ServerState:
        """The app's insides."""
        return state_of(self.app)

    def http(self, key: str) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=f"{self.url}/api/v1", headers={"X-API-Key": key}, timeout=30)

    def sdk(self, key: str) -> tinker.ServiceClient:
        """The official client."""
        return sdk_client(self.url, key)


ServeApi = Callable[..., AbstractContextManager[Api]]


@pytest.fixture(scope="session")
def serve_api(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> ServeApi:
    """Serves an app on a database for the length of a block: ``with serve_api(url, long_poll_s=1) as api``.

    What is given by name are settings, but for the clock the app goes by.
    """

    @contextmanager
    def serve(database_url: str, *, clock: Clock | None = None, **overrides: object) -> Iterator[Api]:
        home: Path = tmp_path_factory.mktemp("home")
        values: dict[str, object] = {
            "home": home,
            "database_url": database_url,
            "redis_url": redis_url,
            "port": 0,
            "long_poll_s": 0.5,
            "inline_payload_bytes": 4096,
            "max_body_bytes": 200_000,
            "max_outstanding_samples": 5,
            "tell_model_folder": True,
        }
        settings = Settings.model_validate(values | overrides)
        stores = Stores.at(settings.resolved_database_url, SystemClock(), limits=settings.tenant_limits)
        app = create_app(settings, clock=clock)
        server = ApiServer(app, settings)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        pause = threading.Event()
        for _ in range(int(_START_TIMEOUT_S / 0.02)):
            if server.started or not thread.is_alive():
                break
            pause.wait(0.02)
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        worker = FakeWorker(settings)
        try:
            yield Api(f"http://127.0.0.1:{port}", settings, server, app, worker, stores)
        finally:
            server.should_exit = True
            thread.join(timeout=15)
            assert not thread.is_alive()

    return serve


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def api(request: pytest.FixtureRequest, serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """One app with a working worker for all tests, on each database."""
    with serve_api(make_database_url(request.param)) as served:
        served.worker.start()
        yield served
        served.worker.stop()


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def victim(
    request: pytest.FixtureRequest, serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> Iterator[Victim]:
    """A tenant that owns one of everything, on each database; its worker rests."""
    url = make_database_url(request.param)
    with serve_api(url, long_poll_s=0.2, max_outstanding_samples=1_000_000, custom_loss_server_side=True) as api:
        api.worker.start()
        with attacked(api) as one:
            yield one
        api.worker.stop()


@pytest.fixture
def key(api: Api) -> str:
    """The key of a new tenant."""
    return api.new_key()


@pytest.fixture
def http(api: Api, key: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of a new tenant."""
    with api.http(key) as client:
        yield client


@pytest.fixture
def session_id(http: httpx.Client) -> str:
    """A session of the new tenant."""
    return str(http.post("/create_session", json={"type": "create_session"}).json()["session_id"])


@pytest.fixture
def model_id(http: httpx.Client, session_id: str) -> str:
    """An adapter of the new tenant, already made."""
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    ticket = http.post("/create_model", json=body).json()
    result = retrieve(http, ticket["request_id"])
    assert result.status_code == 200
    return str(ticket["model_id"])
