"""The gateway of the Twinkle dialect, over plain HTTP: presence, capacity, runs and checkpoints of both dialects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL, CAPABILITIES, WEIGHTS
from harness.polling import wait_for
from twinkle.tasks.pushing import CheckpointPusher
from twinkle_client import TwinkleClient

if TYPE_CHECKING:
    from conftest import Api, ServeApi

UNKNOWN = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def twinkle(api: Api, key: str) -> Iterator[httpx.Client]:
    """A client that sends its key as upstream's does."""
    headers = {"Twinkle-Authorization": f"Bearer {key}", "Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{api.url}/api/v1/twinkle", headers=headers, timeout=30) as client:
        yield client


def save(http: httpx.Client, model_id: str, seq_id: int, name: str, route: str = "save_weights") -> str:
    body = {"model_id": model_id, "seq_id": seq_id, "path": name}
    path = retrieve(http, http.post(f"/{route}", json=body).json()["request_id"]).json()["path"]
    return str(path)


def test_health_needs_no_key_and_no_header(api: Api) -> None:
    shallow = httpx.get(f"{api.url}/api/v1/twinkle/healthz")
    deep = httpx.get(f"{api.url}/api/v1/twinkle/healthz/deep")

    assert (shallow.status_code, shallow.json()) == (200, {"status": "ok"})
    assert deep.status_code == 200
    assert deep.json() == {"healthy": True, "models": {BASE_MODEL: {"healthy": True, "status_code": 200}}}


def test_a_model_without_a_live_worker_is_told_by_the_deep_health(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("sqlite")) as api:
        nothing_served = httpx.get(f"{api.url}/api/v1/twinkle/healthz/deep")
        api.worker.register()
        api.worker.release()
        headers = {"X-API-Key": api.new_key()}

        def dead() -> httpx.Response | None:
            answer = httpx.get(f"{api.url}/api/v1/twinkle/healthz/deep")
            return answer if answer.json()["models"] else None

        answer = wait_for(dead, what="the board sees the mesh")
        capacity = httpx.get(f"{api.url}/api/v1/twinkle/capacity_info", headers=headers).json()

    assert (nothing_served.status_code, nothing_served.json()) == (503, {"healthy": False, "models": {}})
    assert answer.status_code == 503
    assert answer.json() == {"healthy": False, "models": {BASE_MODEL: {"healthy": False, "status_code": 503}}}
    assert capacity == {"max_loras": 0, "used_loras": 0, "free_loras": 0}


def test_capacity_is_that_of_the_slots_of_live_meshes(twinkle: httpx.Client, model_id: str) -> None:
    def used() -> dict[str, int] | None:
        capacity = twinkle.get("/capacity_info").json()
        return capacity if capacity["used_loras"] else None

    capacity = wait_for(used, what="the board sees the adapter")

    assert capacity["max_loras"] == CAPABILITIES.adapter_slots == capacity["used_loras"] + capacity["free_loras"]


def test_the_served_models_are_listed(twinkle: httpx.Client) -> None:
    (model,) = twinkle.get("/get_server_capabilities").json()["supported_models"]

    assert model["model_name"] == BASE_MODEL


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Twinkle-Authorization": "Bearer tml-wrong", "Authorization": "Bearer {key}"}, 401),
        ({"Twinkle-Authorization": "Bearer {key}", "Authorization": "Bearer tml-wrong"}, 200),
        ({"Twinkle-Authorization": "Bearer {key}", "X-API-Key": "tml-wrong"}, 200),
        ({"Authorization": "Bearer {key}"}, 200),
        ({"Authorization": "Basic abc", "X-API-Key": "{key}"}, 200),
    ],
)
def test_twinkles_own_header_wins_over_the_others(api: Api, key: str, headers: dict[str, str], status: int) -> None:
    sent = {name: value.format(key=key) for name, value in headers.items()}

    answer = httpx.get(f"{api.url}/api/v1/twinkle/training_runs", headers=sent)

    assert answer.status_code == status
    assert status == 200 or answer.json().keys() == {"detail", "code"}


def test_the_headers_of_upstreams_client_are_taken_and_its_request_id_comes_back(twinkle: httpx.Client) -> None:
    names = ("x-request-id", "X-Ray-Serve-Request-Id", "serve_multiplexed_model_id", "Serve-Multiplexed-Model-Id")
    headers = dict.fromkeys(names, "20261120_225656-9cf3f550")

    answers = [
        twinkle.get("/training_runs", headers=headers),
        twinkle.get("/training_runs/nobody", headers=headers),
        twinkle.post("/create_session", json={"metadata": None}, headers={**headers, "X-Twinkle-Session-Id": "any"}),
    ]

    assert [answer.status_code for answer in answers] == [200, 404, 200]
    assert {answer.headers["x-request-id"] for answer in answers} == {"20261120_225656-9cf3f550"}


@pytest.mark.parametrize("sent", [b"", b"a" * 257, b"a b", b"caf\xe9", b"a\tb"])
def test_a_request_id_that_is_none_is_not_echoed(twinkle: httpx.Client, sent: bytes) -> None:
    answer = twinkle.get("/healthz", headers={b"x-request-id": sent})

    assert answer.status_code == 200
    assert "x-request-id" not in answer.headers


def test_sessions_are_those_of_the_other_dialect(api: Api, http: httpx.Client, twinkle: httpx.Client) -> None:
    session_id = twinkle.post("/create_session", json={"metadata": {"a": 1}}).json()["session_id"]
    beats = [twinkle.post("/session_heartbeat", json={"session_id": session_id})]
    shown = http.get(f"/sessions/{session_id}").json()
    beats.append(http.post("/session_heartbeat", json={"session_id": session_id}))
    unknown = twinkle.post("/session_heartbeat", json={"session_id": UNKNOWN})
    with api.http(api.new_key()) as stranger:
        foreign = stranger.post("/twinkle/session_heartbeat", json={"session_id": session_id})
    http.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    finished = twinkle.post("/session_heartbeat", json={"session_id": session_id})

    assert [beat.status_code for beat in beats] == [200, 200]
    assert beats[0].json() == {}
    assert shown["user_metadata"] == {"a": "1"}
    assert unknown.status_code == foreign.status_code == 404
    assert unknown.json()["detail"] == foreign.json()["detail"] == "Unknown session"
    assert finished.status_code == 410


def test_a_resent_wish_for_a_session_gets_the_same_one_and_a_request_id_makes_none_the_same(
    twinkle: httpx.Client,
) -> None:
    def opened(**headers: str) -> str:
        return str(twinkle.post("/create_session", json={"metadata": {}}, headers=headers).json()["session_id"])

    assert opened(**{"x-idempotency-key": "once"}) == opened(**{"x-idempotency-key": "once"})
    assert opened(**{"x-request-id": "one"}) != opened(**{"x-request-id": "one"})


def test_a_client_is_told_that_it_may_send_calls_again(twinkle: httpx.Client) -> None:
    assert twinkle.post("/create_session", json={}).json()["offers"] == ["idempotency", "futures"]


def test_a_run_of_the_other_dialect_is_listed_with_its_true_sizes_and_its_owners_name(
    api: Api, key: str, http: httpx.Client, twinkle: httpx.Client, model_id: str
) -> None:
    save(http, model_id, 1, "first")
    save(http, model_id, 2, "second")
    sampled = save(http, model_id, 3, "third", "save_weights_for_sampler")
    save(http, model_id, 4, "away", "save_weights_external")

    page = twinkle.get("/training_runs", params={"limit": 5}).json()
    (run,) = page["training_runs"]
    checkpoints = twinkle.get(f"/training_runs/{model_id}/checkpoints").json()

    assert page["cursor"] == {"limit": 5, "offset": 0, "total_count": 1}
    assert run == twinkle.get(f"/training_runs/{model_id}").json()
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (model_id, BASE_MODEL, 8)
    assert (run["is_lora"], run["corrupted"], run["save_dir"]) == (True, False, None)
    assert run["model_owner"].startswith("tenant-") and key not in str(page)
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/second"
    assert run["last_sampler_checkpoint"]["twinkle_path"] == sampled.replace("tinker://", "twinkle://")
    ids = [one["checkpoint_id"] for one in checkpoints["checkpoints"]]
    assert ids == ["weights/first", "weights/second", "sampler_weights/third"]
    assert checkpoints["cursor"]["total_count"] == 3
    assert {one["size_bytes"] for one in checkpoints["checkpoints"]} == {len(WEIGHTS)}
    assert [one["checkpoint_type"] for one in checkpoints["checkpoints"]] == ["training", "training", "sampler"]


@pytest.mark.parametrize("scheme", ["tinker://", "twinkle://"])
def test_a_path_of_either_scheme_says_whose_weights_it_is(
    http: httpx.Client, twinkle: httpx.Client, model_id: str, scheme: str
) -> None:
    path = save(http, model_id, 1, "one").replace("tinker://", scheme)

    info = twinkle.post("/weights_info", json={"twinkle_path": path}).json()
    found = twinkle.get(f"/checkpoint_path/{model_id}/weights/one").json()

    assert info.items() >= {"training_run_id": model_id, "base_model": BASE_MODEL, "is_lora": True}.items()
    assert info["lora_rank"] == 8 and info["model_owner"].startswith("tenant-")
    assert found == dict.fromkeys(("path", "twinkle_path"), f"twinkle://{model_id}/weights/one")


def test_a_checkpoint_is_deleted_once(http: httpx.Client, twinkle: httpx.Client, model_id: str) -> None:
    save(http, model_id, 1, "one")
    where = f"/training_runs/{model_id}/checkpoints/weights/one"

    deleted, again = twinkle.delete(where), twinkle.delete(where)

    assert (deleted.status_code, deleted.json()["success"]) == (200, True)
    assert again.status_code == 404
    assert twinkle.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"] == []


def test_someone_elses_runs_answer_like_unknown_ones(api: Api, http: httpx.Client, model_id: str) -> None:
    save(http, model_id, 1, "one")
    stranger = api.http(api.new_key())

    def attempts(run: str) -> list[tuple[int, str]]:
        answers = [
            stranger.get(f"/twinkle/training_runs/{run}"),
            stranger.get(f"/twinkle/training_runs/{run}/checkpoints"),
            stranger.delete(f"/twinkle/training_runs/{run}/checkpoints/weights/one"),
            stranger.get(f"/twinkle/checkpoint_path/{run}/weights/one"),
            stranger.post("/twinkle/weights_info", json={"twinkle_path": f"twinkle://{run}/weights/one"}),
        ]
        return [(answer.status_code, answer.text.replace(run, "R")) for answer in answers]

    theirs = attempts(model_id)

    assert [status for status, _ in theirs] == [404] * 5
    assert theirs == attempts(f"{UNKNOWN}:train:0")
    assert stranger.get("/twinkle/training_runs").json()["cursor"]["total_count"] == 0


@pytest.mark.parametrize("checkpoint_id", ["weights", "weights/a/b", "nothing/a", "weights/..", "weights/a%2Fb"])
def test_a_checkpoint_id_that_is_none_is_refused(twinkle: httpx.Client, model_id: str, checkpoint_id: str) -> None:
    refused = twinkle.get(f"/checkpoint_path/{model_id}/{checkpoint_id}")

    assert refused.status_code in {400, 404}
    assert refused.json()["detail"]


def test_the_status_counts_what_the_caller_has_and_nobody_else(
    api: Api, http: httpx.Client, twinkle: httpx.Client, model_id: str
) -> None:
    session_id = model_id.split(":")[0]
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    http.post("/create_sampling_session", json=sampler)
    mine = twinkle.get("/status").json()
    with api.http(api.new_key()) as stranger:
        theirs = stranger.get("/twinkle/status").json()

    assert mine["resources"] == {"sessions": 1, "models": 1, "sampling_sessions": 1, "futures": 0}
    assert mine["cleanup"] == {"running": True, "expiration_timeout": api.settings.result_ttl_s}
    assert theirs["resources"] == dict.fromkeys(mine["resources"], 0)


def test_openais_routes_answer_under_the_prefix_of_upstreams_gateway_too(twinkle: httpx.Client, api: Api) -> None:
    models = twinkle.get(f"{api.url}/api/v1/models")
    unknown = twinkle.post(f"{api.url}/api/v1/chat/completions", json={"model": "none", "messages": [{}]})

    assert models.json()["data"][0].items() >= {"id": BASE_MODEL, "object": "model", "owned_by": "twinkle"}.items()
    assert unknown.status_code == 400
    assert unknown.json()["error"]["type"] == "invalid_request_error"


def test_checkpoints_are_pushed_by_themselves_where_their_owner_wants_it_and_tokens_are_shown_to_nobody(
    api: Api, key: str, http: httpx.Client, model_id: str
) -> None:
    pusher = CheckpointPusher(api.stores.pushes, api.stores.jobs)
    with TwinkleClient(api.url, key) as client:
        wanted = client.push_checkpoints("team/{run}-{checkpoint}", hub_token="hf-secret", run_id=model_id)
        path = save(http, model_id, 1, "first")
        pusher.push()
        (listed,) = client.list_pushes()
        (job,) = http.get(f"{api.url}/api/native/v1/jobs").json()["jobs"]
        shown = http.get(f"{api.url}/api/native/v1/jobs/{listed.last_job}").json()
        ended = client.end_push(wanted.push_id)
        left = client.list_pushes()

    assert (wanted.to, wanted.private, wanted.run_id) == ("ms://team/{run}-{checkpoint}", True, model_id)
    assert listed.last_job == job["id"] and job["name"].startswith(f"push of {path} to ms://team/")
    assert (shown["spec"]["checkpoint"], shown["spec"]["private"]) == (path, True)
    assert shown["spec"]["to"].endswith("-first") and "hf-secret" not in str((shown, listed))
    assert ended.push_id == wanted.push_id and left == []


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "to"),
        ({"to": "team/name"}, 400, "needs hub_token"),
        ({"to": "team", "hub_token": "t"}, 400, "owner and repository"),
        ({"to": "file:///../etc"}, 400, "plain address"),
        ({"to": "team/name", "hub_token": "t", "run_id": "nobody"}, 404, "no training run"),
    ],
)
def test_a_push_that_cannot_be_is_refused(twinkle: httpx.Client, body: dict[str, str], status: int, words: str) -> None:
    refused = twinkle.post("/pushes", json=body)

    assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text


def test_a_push_of_another_tenant_s_is_not_there(api: Api, twinkle: httpx.Client) -> None:
    wanted = twinkle.post("/pushes", json={"to": "s3://bucket/{run}"}).json()
    with api.http(api.new_key()) as stranger:
        answers = [stranger.get("/twinkle/pushes"), stranger.delete(f"/twinkle/pushes/{wanted['push_id']}")]

    assert answers[0].json() == {"pushes": []} and answers[1].status_code == 404
    assert [one["push_id"] for one in twinkle.get("/pushes").json()["pushes"]] == [wanted["push_id"]]
