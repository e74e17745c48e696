"""A development server takes any key, and answers one machine's own programs alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.fake_worker import BASE_MODEL
from harness.leftovers import sdk_client
from twinkle.core.errors import ConfigError
from twinkle.core.settings import load_settings
from twinkle.storage.tenants.keyring import digest_of_key

if TYPE_CHECKING:
    from conftest import Api, ServeApi


@pytest.fixture(scope="module")
def open_api(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    with serve_api(make_database_url("sqlite"), any_key=True) as served:
        served.worker.start()
        yield served
        served.worker.stop()


def _session(api: Api, **headers: str) -> httpx.Response:
    body = {"type": "create_session", "tags": []}
    return httpx.post(f"{api.url}/api/v1/create_session", json=body, headers=headers)


def _runs(api: Api, **headers: str) -> list[str]:
    answer = httpx.get(f"{api.url}/api/v1/training_runs", headers=headers)
    assert answer.status_code == 200, answer.text
    return [run["training_run_id"] for run in answer.json()["training_runs"]]


@pytest.mark.parametrize(
    "headers", [{}, {"X-API-Key": ""}, {"X-API-Key": "EMPTY_TOKEN"}, {"X-API-Key": "tml-invented"}]
)
def test_any_key_and_none_is_taken(open_api: Api, headers: dict[str, str]) -> None:
    assert _session(open_api, **headers).status_code == 200


def test_each_key_is_a_tenant_of_its_own_and_the_same_again(open_api: Api) -> None:
    mine = sdk_client(open_api.url, "tml-mine").create_lora_training_client(BASE_MODEL, rank=4).result()

    assert _runs(open_api, **{"X-API-Key": "tml-mine"}) == [str(mine.model_id)]
    assert _runs(open_api, **{"X-API-Key": "tml-another"}) == []


def test_a_key_that_was_made_opens_its_own_tenant(open_api: Api) -> None:
    key = open_api.stores.tenants.create_key("made", "test")
    run = open_api.sdk(key).create_lora_training_client(BASE_MODEL, rank=4).result()

    assert _runs(open_api, **{"X-API-Key": key}) == [str(run.model_id)]


def test_what_was_taken_here_opens_nothing_where_keys_are_asked_for(open_api: Api) -> None:
    assert _session(open_api, **{"X-API-Key": "tml-from-the-open-days"}).status_code == 200

    assert open_api.stores.tenants.key("tml-from-the-open-days") is None
    stored = {row.digest for row in open_api.stores.database.read("SELECT digest FROM api_key")}
    assert digest_of_key("tml-from-the-open-days") not in stored


def test_a_model_is_known_by_its_name_behind_any_hub_and_a_checkpoint_in_both_schemes(open_api: Api) -> None:
    service = sdk_client(open_api.url, "tml-names")
    run = service.create_lora_training_client(f"ms://ms://{BASE_MODEL}", rank=4).result()
    path = run.save_state("one").result().path
    other = path.replace("tinker://", "twinkle://")

    assert run.get_info().model_data.model_name == BASE_MODEL
    again = service.create_training_client_from_state(path).result()
    with open_api.http("tml-names") as http:
        weights = http.post("/weights_info", json={"tinker_path": other})
        session = http.post(
            "/create_sampling_session",
            json={
                "session_id": str(run.model_id).partition(":")[0],
                "sampling_session_seq_id": 7,
                "model_path": other,
                "base_model": f"hf://{BASE_MODEL}",
            },
        )
    assert again.get_info().model_data.model_name == BASE_MODEL
    assert weights.status_code == session.status_code == 200, (weights.text, session.text)
    assert weights.json()["base_model"] == BASE_MODEL


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Forwarded-For", "10.0.0.7"),
        ("Forwarded", "for=10.0.0.7"),
        ("Via", "1.1 proxy"),
        ("X-Real-IP", "10.0.0.7"),
        ("Host", "evil.example"),
        ("Origin", "https://evil.example"),
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/create_session", "/v1/models", "/api/v1/training_runs"])
def test_what_may_come_from_elsewhere_is_refused(open_api: Api, header: str, value: str, path: str) -> None:
    method = "POST" if path.endswith("session") else "GET"
    answer = httpx.request(
        method, f"{open_api.url}{path}", headers={header: value}, json={} if method == "POST" else None
    )

    assert answer.status_code == 401
    assert "takes any key" in answer.text


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.org"])
def test_it_does_not_listen_for_others(host: str) -> None:
    with pytest.raises(ConfigError, match=r"ANY_KEY.*only, not on"):
        load_settings(host=host, any_key=True)
    assert load_settings(host="127.0.0.1", any_key=True).any_key
    assert load_settings(host=host).any_key is False


SAMPLES = """
import sys
from twinkle_client import init_tinker_client
init_tinker_client(sys.argv[1], sys.argv[2])
from tinker import ServiceClient
print(ServiceClient().create_sampling_client(model_path=sys.argv[3], base_model=sys.argv[4]).get_base_model())
"""


def test_the_sdk_of_a_process_that_asked_for_it_samples_from_a_twinkle_path(open_api: Api) -> None:
    run = sdk_client(open_api.url, "tml-samples").create_lora_training_client(BASE_MODEL, rank=4).result()
    path = run.save_weights_for_sampler("drawn").result().path.replace("tinker://", "twinkle://")

    done = subprocess.run(
        [sys.executable, "-c", SAMPLES, open_api.url, "tml-samples", path, BASE_MODEL],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == BASE_MODEL
