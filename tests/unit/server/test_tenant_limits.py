"""What a tenant may use, as the official client meets it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
import tinker

from harness.calls import passes, send_passes
from harness.fake_worker import BASE_MODEL
from harness.leftovers import sdk_client
from harness.polling import wait_for
from twinkle.storage.database import Database
from twinkle.storage.tenants.tenants import Tenants

if TYPE_CHECKING:
    from conftest import Api, ServeApi

ADMIN_KEY = "the-administrators"


@pytest.fixture(scope="module")
def limited(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """A served app with short limits."""
    overrides = {
        "admin_key": ADMIN_KEY,
        "tenant_max_adapters": 2,
        "max_outstanding_samples": 1000,
    }
    with serve_api(make_database_url("sqlite"), **overrides) as served:
        served.worker.start()
        yield served
        served.worker.stop()


def _tenants(api: Api) -> Tenants:
    return api.stores.tenants


def _named(api: Api, name: str) -> str:
    return api.stores.tenants.create_key(name, "test")


def test_one_adapter_too_many_is_an_error_that_says_what_to_do_and_room_comes_back(limited: Api) -> None:
    key = _named(limited, "many-adapters")
    first = limited.sdk(key)
    for _ in range(2):
        first.create_lora_training_client(BASE_MODEL, rank=8).result()

    with pytest.raises(tinker.BadRequestError, match="you have 2 adapters in live sessions, and 2 may be"):
        first.create_lora_training_client(BASE_MODEL, rank=8).result()
    first.close("success").result()

    limited.sdk(key).create_lora_training_client(BASE_MODEL, rank=8).result()


def test_samples_above_the_rate_get_429_and_the_client_comes_again_by_itself(limited: Api) -> None:
    key = _named(limited, "sampling")
    client = limited.sdk(key).create_sampling_client(base_model=BASE_MODEL)
    _tenants(limited).set("sampling", limits={"tokens_per_minute": 3600})
    prompt, params = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=840)
    # At 60 tokens a second, of which those of 10 seconds may come at once: nothing more is let in for 4.
    client.sample(prompt, 1, params).result()

    began = time.monotonic()
    with limited.http(key) as http:
        session = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
        sampler = http.post(
            "/create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL},
        ).json()["sampling_session_id"]
        body = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        }
        refused = wait_for(lambda: _refused(http, body, since=began), what="a refusal")
    client.sample(prompt, 1, params).result(timeout=60)

    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["code"] == "overloaded" and "3600 tokens a minute" in refused.json()["detail"]
    assert time.monotonic() - began >= 1.0


def _refused(http: httpx.Client, body: dict[str, object], *, since: float) -> httpx.Response | None:
    # On a machine so busy that what the first sample used up is over, these use it up.
    max_tokens = 4 if time.monotonic() < since + 3 else 60
    response = http.post("/asample", json={**body, "sampling_params": {"max_tokens": max_tokens}})
    body["seq_id"] = int(str(body["seq_id"])) + 1
    return response if response.status_code == 429 else None


def test_training_above_the_rate_is_accepted_and_waits_and_says_why(limited: Api) -> None:
    key = _named(limited, "training")
    client = limited.sdk(key).create_lora_training_client(BASE_MODEL, rank=8)
    _tenants(limited).set("training", limits={"tokens_per_minute": 60})
    # Ten seconds' worth may be used at once; the six that are left are what a busy machine has to ask in.
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * 16),
        loss_fn_inputs={"target_tokens": tinker.TensorData(data=[1] * 16, dtype="int64", shape=[16])},
    )
    model_id = str(client.model_id)
    with limited.http(key) as http:
        second = f"{limited.url}/api/native/v1/futures/{model_id}:req:2"
        with limited.worker.paused():
            futures = [client.forward_backward([datum], "cross_entropy") for _ in range(2)]
            # The client sends each from a thread of its own: the first is only answered once the second is there.
            wait_for(lambda: http.get(second).status_code == 200, what="the second step's acceptance")
        futures[0].result()
        pending = http.post("/retrieve_future", json={"request_id": f"{model_id}:req:2"})
        standing = http.get(second).json()

    assert pending.status_code == 408
    assert pending.json()["queue_state"] == "paused_rate_limit"
    assert "tokens per minute are used up" in pending.json()["queue_state_reason"]
    assert standing["reason"] == "rate_limited" and 0 < standing["starts_in_s"] <= 7
    assert futures[1].result(timeout=60).metrics["loss:sum"] == 2.0


def test_only_the_owner_is_told_where_a_future_stands(limited: Api) -> None:
    owner, other = _named(limited, "owner"), _named(limited, "other")
    client = limited.sdk(owner).create_lora_training_client(BASE_MODEL, rank=8).result()
    future = f"{limited.url}/api/native/v1/futures/{client.model_id}:req:1"
    with limited.http(owner) as http, limited.http(other) as stranger, limited.worker.paused():
        # The line was looked at a moment before.
        http.get(f"{limited.url}/api/native/v1/futures/{client.model_id}:req:0").raise_for_status()
        send_passes(http, passes(str(client.model_id), 1))
        told, refused = http.get(future), stranger.get(future)
        pending = http.post("/retrieve_future", json={"request_id": f"{client.model_id}:req:1"}).json()

    assert told.json()["reason"] == "queued" and told.json()["place"]["num_before"] == 0
    assert told.json()["place"]["is_exact"] and told.json()["attempt"] == 0
    assert pending["queue_state"] == "active"
    assert pending["queue_state_reason"].startswith("next in line on mesh 'default'")
    assert refused.status_code == 404


def test_an_administrator_sees_all_lines_and_nobody_else_does(limited: Api) -> None:
    key = _named(limited, "curious")
    url = f"{limited.url}/api/native/v1/meshes/default/queue"
    client = limited.sdk(key).create_lora_training_client(BASE_MODEL, rank=8).result()

    with limited.http(key) as http, limited.worker.paused():
        send_passes(http, passes(str(client.model_id), 1))
        refused = [http.get(url), http.get(url, headers={"X-Admin-Key": "guessed"})]
        told = http.get(url, headers={"X-Admin-Key": ADMIN_KEY})

    assert [response.status_code for response in refused] == [404, 404]
    assert told.status_code == 200, told.text
    assert "curious" in {line["tenant"] for line in told.json()["tenants"]}


@pytest.mark.parametrize("priority", ["high", "101", "1.5"])
def test_a_priority_that_is_none_is_refused_by_name(limited: Api, priority: str) -> None:
    with limited.http(_named(limited, f"priority-{priority}")) as http:
        body = {"type": "create_session", "user_metadata": {"twinkle_priority": priority}}
        answer = http.post("/create_session", json=body)

    assert answer.status_code == 400
    assert "user_metadata.twinkle_priority: must be a whole number" in answer.json()["detail"]


def test_a_priority_comes_from_the_run_else_from_its_session(limited: Api) -> None:
    service = sdk_client(limited.url, _named(limited, "priorities"), user_metadata={"twinkle_priority": "3"})
    plain = service.create_lora_training_client(BASE_MODEL, rank=8).result()
    urgent = service.create_lora_training_client(BASE_MODEL, rank=8, user_metadata={"twinkle_priority": "7"})
    urgent.save_weights_and_get_sampling_client().result()
    service.create_sampling_client(base_model=BASE_MODEL).result()

    rows = Database(limited.settings.resolved_database_url).read(
        "SELECT l.id, l.nice FROM lane l JOIN tenant t ON t.id = l.tenant WHERE t.name = 'priorities'"
    )
    nice = dict(rows)
    assert (nice[str(plain.model_id)], nice[str(urgent.model_id)]) == (-3, -7)
    assert sorted(value for lane, value in nice.items() if ":sample:" in lane) == [-7, -3]


def test_a_fork_is_an_adapter_like_any_other(limited: Api) -> None:
    key = _named(limited, "forking")
    service = limited.sdk(key)
    runs = [service.create_lora_training_client(BASE_MODEL, rank=8) for _ in range(2)]

    with limited.http(key) as http:
        answer = http.post(f"{limited.url}/api/native/v1/runs/{runs[0].model_id}/fork", json={"operation": 0})

    assert (answer.status_code, answer.json()["code"]) == (400, "limit_reached")
