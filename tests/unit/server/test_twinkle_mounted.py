"""A server that its clients reach under a path of its host: every route answers there, and URLs given out begin so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.routing import Mount

import twinkle_client
from harness.calls import optim_step, retrieve
from harness.fake_worker import BASE_MODEL
from twinkle.core.settings import Settings
from twinkle.server.app import create_app
from twinkle.server.connections.direct import DirectRoute

if TYPE_CHECKING:
    from conftest import Api, ServeApi


@pytest.fixture(scope="module")
def mounted(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """An app under /gpu/twinkle, behind nothing that would cut that off."""
    with serve_api(make_database_url("sqlite"), root_path="/gpu/twinkle") as api:
        api.worker.start()
        yield api
        api.worker.stop()


def client(api: Api, path: str = "/gpu/twinkle") -> httpx.Client:
    return httpx.Client(base_url=f"{api.url}{path}/api/v1", headers={"X-API-Key": api.new_key()}, timeout=30)


def test_every_kind_of_route_answers_under_the_path(mounted: Api) -> None:
    with client(mounted) as http:
        models = httpx.get(f"{mounted.url}/gpu/twinkle/v1/models", headers=http.headers)
        unknown = httpx.get(f"{mounted.url}/gpu/twinkle/v1/models/none", headers=http.headers)
        assert http.get("/healthz").json() == {"status": "ok"}
        assert http.get("/twinkle/healthz", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
        assert http.post(f"/model/{BASE_MODEL}/twinkle/create", json={}).status_code == 200
        assert http.post(f"/sampler/{BASE_MODEL}/twinkle/create", json={}).status_code == 200
        assert http.get("/nothing").json()["detail"] == "no route GET /api/v1/nothing"

    assert models.status_code == 200
    assert unknown.json()["error"]["code"] == "not_found"


def test_what_has_a_direct_way_keeps_it(mounted: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    answer = DirectRoute.__call__

    async def noted(self: DirectRoute, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        taken.append(scope["path"])
        await answer(self, scope, receive, send)

    monkeypatch.setattr(DirectRoute, "__call__", noted)
    with client(mounted) as http:
        http.post("/optim_step", json=optim_step("nobody:train:0", 1))

    assert taken == ["/api/v1/optim_step"]


def test_a_proxy_may_cut_the_path_off(mounted: Api) -> None:
    with client(mounted, path="") as http:
        assert http.get("/twinkle/training_runs").status_code == 200


@pytest.mark.parametrize("path", ["/gpu/twinkle", ""])
def test_links_that_are_given_out_lead_back_through_the_path(mounted: Api, path: str) -> None:
    with client(mounted, path) as http:
        session = http.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
        run = http.post("/create_model", json=body).json()["model_id"]
        save = {"model_id": run, "seq_id": 1, "path": "away"}
        retrieve(http, http.post("/save_weights_external", json=save).json()["request_id"])
        urls = http.get(f"/training_runs/{run}/checkpoints/external_weights/away/external_weights_urls").json()["urls"]
        trace = http.get(f"/sessions/{session}/trace_export").json()["url"]

    for url in (*urls.values(), trace):
        assert url.startswith(f"{mounted.url}/gpu/twinkle/api/v1/")
        assert httpx.get(url).status_code == 200


def test_the_document_says_where_the_routes_are(mounted: Api) -> None:
    document = httpx.get(f"{mounted.url}/gpu/twinkle/openapi.json").json()

    assert document["servers"] == [{"url": "/gpu/twinkle"}]
    assert "/api/v1/twinkle/healthz" in document["paths"]


def test_the_client_takes_a_base_url_with_a_path(mounted: Api) -> None:
    connected = twinkle_client.init_twinkle_client(base_url=f"{mounted.url}/gpu/twinkle", api_key=mounted.new_key())
    try:
        assert connected.health_check()
        assert [model.model_name for model in connected.get_server_capabilities().supported_models] == [BASE_MODEL]
    finally:
        connected.close()


def test_the_path_of_the_public_url_is_the_default() -> None:
    settings = Settings(redis_url="redis://nowhere", public_url="https://host/twinkle/")

    assert settings.mounted_at == "/twinkle"
    assert create_app(settings).openapi()["servers"] == [{"url": "https://host/twinkle/"}]
    assert "servers" not in create_app(Settings(redis_url="redis://nowhere")).openapi()


def test_an_app_around_it_may_say_where_it_lies() -> None:
    app = create_app(Settings(redis_url="redis://nowhere"))
    around = TestClient(Starlette(routes=[Mount("/inner", app=app)]))

    assert around.get("/inner/api/v1/healthz").json() == {"status": "ok"}
    assert around.get("/inner/v1/nothing").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "path", ["twinkle", "/twinkle/", "/", "/api", "/api/v1", "/v1", "/a b", "/a/../b", "//a", "/a?b"]
)
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="must be like /twinkle"):
        Settings(root_path=path)
