"""Keys, and what is somebody else's: it answers like what does not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import optim_step, passes, retrieve, send_passes

if TYPE_CHECKING:
    from conftest import Api

ROUTES = ["/client/config", "/create_session", "/retrieve_future", "/forward_backward", "/asample", "/telemetry"]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_wants_a_key(api: Api, path: str) -> None:
    refused = httpx.post(f"{api.url}/api/v1{path}", content=b"{}")

    assert refused.status_code == 401
    assert refused.json()["code"] == "unauthenticated"


@pytest.mark.parametrize("key", ["", "nonsense", "tml-wrong", "tml-" + "x" * 5000])
def test_a_wrong_key_opens_nothing(api: Api, key: str) -> None:
    refused = httpx.get(f"{api.url}/api/v1/training_runs", headers={"X-API-Key": key})

    assert refused.status_code == 401
    assert refused.json()["detail"]


def test_health_needs_no_key(api: Api) -> None:
    assert httpx.get(f"{api.url}/api/v1/healthz").json() == {"status": "ok"}
    ready = httpx.get(f"{api.url}/api/v1/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "reasons": []})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("POST", "/api/v1/nothing", 404), ("GET", "/api/v1/asample", 405), ("GET", "/docs", 404)],
)
def test_unknown_routes_answer_in_the_one_form(api: Api, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, api.url + path)

    assert answer.status_code == status
    assert set(answer.json()) == {"detail", "code"}


def test_someone_elses_ids_answer_like_unknown_ones(api: Api, http: httpx.Client, model_id: str) -> None:
    session_id = model_id.split(":")[0]
    ticket = http.post("/optim_step", json=optim_step(model_id, 1)).json()["request_id"]
    retrieve(http, ticket)
    stranger = api.http(api.new_key())
    unknown = "00000000-0000-0000-0000-000000000000"

    def attempts(session: str, model: str, future: str) -> list[tuple[int, str]]:
        tinker_path = f"tinker://{model}/weights/a"
        answers = [
            stranger.post("/retrieve_future", json={"request_id": future}),
            stranger.post("/optim_step", json=optim_step(model, 2)),
            send_passes(stranger, passes(model, 2)),
            stranger.post("/get_info", json={"model_id": model}),
            stranger.post("/create_model", json={"session_id": session, "model_seq_id": 3, "base_model": "tiny/one"}),
            stranger.post("/session_heartbeat", json={"session_id": session}),
            stranger.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}}),
            stranger.get(f"/sessions/{session}"),
            stranger.get(f"/training_runs/{model}"),
            stranger.get(f"/training_runs/{model}/checkpoints"),
            stranger.post("/weights_info", json={"tinker_path": tinker_path}),
            stranger.delete(f"/training_runs/{model}/checkpoints/weights/a"),
        ]
        return [(a.status_code, a.text.replace(model, "M").replace(session, "S")) for a in answers]

    theirs = attempts(session_id, model_id, ticket)

    assert [status for status, _ in theirs] == [404] * 12
    assert theirs == attempts(unknown, f"{unknown}:train:0", f"{unknown}:train:0:req:1")
    assert stranger.get("/training_runs").json()["cursor"]["total_count"] == 0
    assert retrieve(http, ticket).status_code == 200


def test_an_unknown_sample_future_is_gone_and_any_other_is_not_found(http: httpx.Client) -> None:
    body = {"request_id": "nobody:sample:0:req:0"}

    assert http.post("/retrieve_future", json=body, headers={"X-Tinker-Request-Type": "Sample"}).status_code == 410
    assert http.post("/retrieve_future", json=body, headers={"X-Tinker-Request-Type": "OptimStep"}).status_code == 404


def test_a_bad_parameter_is_named(http: httpx.Client) -> None:
    refused = http.get("/checkpoints", params={"limit": "many"})

    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("limit: ")


def test_a_resent_wish_for_a_session_is_answered_with_the_same_one(api: Api, http: httpx.Client) -> None:
    headers = {"x-idempotency-key": "stainless-python-retry-1"}

    first, again = (http.post("/create_session", json={}, headers=headers).json()["session_id"] for _ in range(2))
    with api.http(api.new_key()) as stranger:
        others = stranger.post("/create_session", json={}, headers=headers).json()["session_id"]

    assert first == again != others


def test_a_session_lives_until_it_is_finished(http: httpx.Client) -> None:
    body = {"user_metadata": {"a": "b"}, "display_name": "mine"}
    headers = {"X-Idempotency-Key": "once"}
    session_id, again = (
        http.post("/create_session", json=body, headers=headers).json()["session_id"] for _ in range(2)
    )
    beat = http.post("/session_heartbeat", json={"session_id": session_id})
    finished = http.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "success"}, "detail": None})

    last_beat = http.post("/session_heartbeat", json={"session_id": session_id})

    assert again == session_id
    assert (beat.status_code, finished.status_code, last_beat.status_code) == (200, 204, 410)
    shown = http.get(f"/sessions/{session_id}").json()
    assert shown == {"training_run_ids": [], "sampler_ids": [], "user_metadata": {"a": "b"}, "display_name": "mine"}
    assert http.get("/sessions").json() == {"sessions": [session_id]}
    assert http.put(f"/sessions/{session_id}/project", json={"project_id": "p"}).status_code == 204


def _first_page(http: httpx.Client, num_sessions: int = 3) -> tuple[list[str], dict[str, str]]:
    """A tenant's sessions, the newest first, and the cursor behind the first of them."""
    ids = [http.post("/create_session", json={}).json()["session_id"] for _ in range(num_sessions)]
    return ids[::-1], http.post("/sessions/search", json={"limit": 1}).json()["next_cursor"]


def test_a_cursor_goes_on_for_who_was_given_it_and_any_other_is_answered_alike(api: Api, http: httpx.Client) -> None:
    mine, cursor = _first_page(http)
    with api.http(api.new_key()) as stranger:
        theirs, of_stranger = _first_page(stranger)
    good = cursor["last_session_id"]
    data, _, signature = good.rpartition(".")
    wrong = {
        "another tenant's": of_stranger["last_session_id"],
        "another tenant's session": theirs[0],
        "a session of one's own": mine[0],
        "unknown": "00000000-0000-0000-0000-000000000000",
        "forged": f"{data[:-4]}AAAA.{signature}",
        "signed by another tenant": f"{data}.{of_stranger['last_session_id'].rpartition('.')[2]}",
        "cut short": good[:-1],
        "without its signature": data,
        "nothing but its signature": signature,
        "empty": "",
        "nonsense": "\x00\ufffd" * 3000,
    }

    def search(text: str) -> httpx.Response:
        return http.post("/sessions/search", json={"limit": 5, "cursor": {**cursor, "last_session_id": text}})

    answers = {why: search(text) for why, text in wrong.items()}

    assert [one["session_id"] for one in search(good).json()["sessions"]] == mine[1:]
    assert not any(session_id in good for session_id in mine)
    unknown = answers["unknown"]
    assert (unknown.status_code, unknown.json()["code"]) == (400, "invalid_input")
    for why, answer in answers.items():
        assert (answer.status_code, answer.text) == (unknown.status_code, unknown.text), why


def test_pages_of_everything_else_are_of_the_callers_own(api: Api, http: httpx.Client, model_id: str) -> None:
    with api.http(api.new_key()) as stranger:
        for offset in (0, 1, 2**31 - 1):
            for route in ("/sessions", "/training_runs", "/checkpoints"):
                page = stranger.get(route, params={"offset": offset}).json()
                assert not page.get("sessions") and not page.get("training_runs") and not page.get("checkpoints")
                assert page.get("cursor", {"total_count": 0})["total_count"] == 0
            of_run = [stranger.get(f"/training_runs/{run}/checkpoints?offset={offset}") for run in (model_id, "none")]
            assert [answer.status_code for answer in of_run] == [404, 404]
            assert of_run[0].text.replace(model_id, "R") == of_run[1].text.replace("none", "R")
