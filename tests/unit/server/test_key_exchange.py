"""Keys exchanged for short-lived tokens: by the SDK and its command line, unmodified, and by plain requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tinker
from tinker import types

from harness.sdk_command_line import run_tinker
from twinkle.core.clock import SystemClock

if TYPE_CHECKING:
    from conftest import Api, ServeApi

LIFETIME_S = 900
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64"),
        "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32"),
    },
)


class FastClock(SystemClock):
    """The time of a machine whose clock runs ahead of its clients' when a test says so."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


@pytest.fixture(scope="module")
def clock() -> FastClock:
    return FastClock()


@pytest.fixture(scope="module")
def database_url(make_database_url: Callable[[str], str]) -> str:
    return make_database_url("sqlite")


@pytest.fixture(scope="module")
def served(serve_api: ServeApi, database_url: str, clock: FastClock) -> Iterator[Api]:
    settings: dict[str, Any] = {"jwt_auth": True, "jwt_ttl_s": LIFETIME_S, "download_url_secret": "shared"}
    with serve_api(database_url, clock=clock, **settings) as api:
        api.worker.start()
        yield api
        api.worker.stop()


@pytest.fixture(scope="module")
def neighbour(served: Api, serve_api: ServeApi, database_url: str, clock: FastClock) -> Iterator[Api]:
    """Another API process of the same deployment, with the flag off."""
    with serve_api(database_url, clock=clock, download_url_secret="shared") as api:
        yield api


def exchange(api: Api, key: str) -> str:
    with api.http(key) as http:
        return str(http.post("/auth/token", json={}).json()["jwt"])


def train(service: tinker.ServiceClient) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    step(training)
    return training


def step(training: tinker.TrainingClient) -> None:
    training.forward_backward([DATUM], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()


def test_the_sdk_trains_samples_and_knows_whose_it_is(served: Api) -> None:
    key = served.new_key()
    with served.sdk(key) as service:
        training = train(service)
        training.save_state("a").result()
        sampling = training.save_weights_and_get_sampling_client()
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=2)
        assert sampling.sample(prompt, 1, params).result().sequences[0].tokens == [0, 1]
        rest = service.create_rest_client()
        identity = rest.whoami().result()
        (listed,) = rest.list_user_checkpoints().result().checkpoints

    owner = served.stores.tenants.key(key)
    assert owner is not None
    assert identity.user_urn == f"tml:apikey:{owner.id}"
    assert identity.org_urn == f"tml:organization:{served.stores.tenants.name_of(owner.tenant)}"
    assert identity.email is None
    assert "/a" in listed.tinker_path


def test_without_the_flag_the_sdk_sends_its_key(neighbour: Api) -> None:
    with neighbour.sdk(neighbour.new_key()) as service, pytest.raises(RuntimeError, match="whoami requires JWT auth"):
        service.create_rest_client().whoami().result()


def test_the_sdk_goes_on_when_its_token_expires_before_it_expected(served: Api, clock: FastClock) -> None:
    with served.sdk(served.new_key()) as service:
        training = train(service)
        clock.ahead_s += LIFETIME_S

        step(training)


def test_the_sdk_trains_on_tokens_that_hardly_live(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("sqlite"), jwt_auth=True, jwt_ttl_s=1) as api:
        api.worker.start()
        with api.sdk(api.new_key()) as service:
            step(train(service))
        api.worker.stop()


def test_a_run_ends_when_its_key_is_revoked(served: Api) -> None:
    key = served.new_key()
    service = served.sdk(key)
    training = train(service)
    with served.http(key) as http:
        assert http.delete("/auth/apikey/me").status_code == 204

    with pytest.raises(tinker.AuthenticationError, match="unknown API key"):
        training.forward_backward([DATUM], "cross_entropy").result()


def test_the_command_line_knows_whose_it_is(served: Api, tmp_path: Path) -> None:
    key = served.new_key()
    # Not in this process, which would keep the credential for the tests of the command line.
    told = run_tinker("--format", "json", "auth", "whoami", base_url=served.url, api_key=key, home=tmp_path)

    owner = served.stores.tenants.key(key)
    assert owner is not None
    assert json.loads(told)["user_urn"] == f"tml:apikey:{owner.id}"


def test_a_token_opens_what_its_key_does_until_that_is_revoked(api: Api, key: str) -> None:
    with api.http(exchange(api, key)) as http, api.http(key) as itself:
        session = http.post("/create_session", json={}).json()["session_id"]
        told = [client.get("/auth/apikey/me").json() for client in (http, itself)]
        assert itself.get(f"/sessions/{session}").status_code == 200
        assert http.delete("/auth/apikey/me").status_code == 204
        ended = [client.get("/sessions").status_code for client in (http, itself)]

    assert told[0] == told[1]
    assert ended == [401, 401]


def test_a_token_is_taken_wherever_a_key_is_by_every_process(served: Api, neighbour: Api) -> None:
    token = exchange(served, served.new_key())

    for api in (served, neighbour):
        headers = {"X-API-Key": token}
        for path in ("/api/v1/sessions", "/api/v1/auth/apikey/me", "/api/native/v1/runs/nobody"):
            assert httpx.get(api.url + path, headers=headers).status_code in (200, 404), path
        assert httpx.get(f"{api.url}/v1/models", headers={"Authorization": f"Bearer {token}"}).status_code == 200


def test_a_token_is_exchanged_for_itself_so_that_none_outlives_its_time(served: Api) -> None:
    token = exchange(served, served.new_key())

    assert exchange(served, token) == token


def test_a_refused_token_says_that_the_key_may_be_exchanged_again(served: Api, clock: FastClock) -> None:
    expired = exchange(served, served.new_key())
    clock.ahead_s += LIFETIME_S
    key = served.new_key()
    revoked = exchange(served, key)
    with served.http(revoked) as http:
        assert http.delete("/auth/apikey/me").status_code == 204

    for token in (expired, revoked, "eyJnonsense"):
        for path, header in (("/api/v1/sessions", token), ("/v1/models", token)):
            refused = httpx.get(served.url + path, headers={"X-API-Key": header})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == 'Bearer error="invalid_token"'
            assert "invalid_token" in refused.text
    for wrong in (key, "tml-wrong"):
        with served.http(wrong) as http:
            refused = http.get("/sessions")
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
        assert "www-authenticate" not in refused.headers
