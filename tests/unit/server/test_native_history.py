"""Our own routes for a run's past: what can be seen of it, rewinds and forks, each tenant's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import optim_step, passes, retrieve, send_passes

if TYPE_CHECKING:
    from conftest import Api


@pytest.fixture
def steps(http: httpx.Client, model_id: str) -> list[str]:
    """The futures of three steps that the run has made."""
    futures = []
    for seq in (1, 3, 5):
        send_passes(http, passes(model_id, seq))
        futures.append(str(http.post("/optim_step", json=optim_step(model_id, seq + 1)).json()["request_id"]))
    assert retrieve(http, futures[-1]).status_code == 200
    return futures


def _post(http: httpx.Client, path: str, body: object, **headers: str) -> httpx.Response:
    return http.post(f"{http.base_url.join('/api/native/v1/')}{path}", json=body, headers=headers)


def _history(http: httpx.Client, run_id: str) -> dict:
    return dict(http.get(f"{http.base_url.join('/api/native/v1/')}runs/{run_id}/history").json())


def test_a_rewound_run_goes_on_with_the_clients_own_numbers(
    http: httpx.Client, model_id: str, steps: list[str]
) -> None:
    ticket = _post(http, f"runs/{model_id}/rewind", {"step": 1}).json()
    assert retrieve(http, ticket["request_id"]).status_code == 200
    send_passes(http, passes(model_id, 7))
    later = http.post("/optim_step", json=optim_step(model_id, 8)).json()
    assert retrieve(http, later["request_id"]).status_code == 200

    history = _history(http, model_id)

    assert ticket == {
        "request_id": f"{model_id}:req:7", "run_id": model_id, "source": model_id, "operation": 2,
    }  # fmt: skip
    assert [(step["step"], step["operation"]) for step in history["steps"]] == [(1, 2), (2, 9)]
    assert [(one["operation"], one["source_operation"]) for one in history["rewinds"]] == [(7, 2)]
    assert history["payload_bytes"] > 0


def test_a_resent_wish_is_answered_and_not_done_again(http: httpx.Client, model_id: str, steps: list[str]) -> None:
    headers = {"x-idempotency-key": f"once-{model_id}"}
    rewinds = [_post(http, f"runs/{model_id}/rewind", {"operation": 4}, **headers).json() for _ in range(2)]
    forks = [_post(http, f"runs/{model_id}/fork", {"step": 2}, **headers).json() for _ in range(2)]

    assert rewinds[0] == rewinds[1]
    assert forks[0] == forks[1]
    assert len(_history(http, model_id)["forks"]) == 1


def test_a_wish_by_a_step_that_was_made_anew_since_is_answered_as_before(
    http: httpx.Client, model_id: str, session_id: str, steps: list[str]
) -> None:
    headers = {"x-idempotency-key": f"anew-{model_id}"}
    wishes = [("fork", {"step": 3}), ("fork", {"step": 2, "session_id": session_id, "model_seq_id": 8})]
    wishes.append(("rewind", {"step": 1}))
    first = [_post(http, f"runs/{model_id}/{verb}", body, **headers).json() for verb, body in wishes]
    for seq in (7, 9):
        send_passes(http, passes(model_id, seq))
        stepped = http.post("/optim_step", json=optim_step(model_id, seq + 1)).json()
    assert retrieve(http, stepped["request_id"]).status_code == 200

    again = [_post(http, f"runs/{model_id}/{verb}", body, **headers).json() for verb, body in wishes]
    history = _history(http, model_id)

    assert again == first
    assert [one["operation"] for one in first] == [6, 4, 2]
    assert [one["operation"] for one in history["steps"]] == [2, 9, 11]
    assert (len(history["forks"]), len(history["rewinds"])) == (2, 1)


def test_a_fork_is_a_run_of_its_own_that_says_where_it_comes_from(
    http: httpx.Client, model_id: str, session_id: str, steps: list[str]
) -> None:
    body = {"step": 3, "session_id": session_id, "model_seq_id": 7}
    ticket = _post(http, f"runs/{model_id}/fork", body).json()
    result = retrieve(http, ticket["request_id"])
    send_passes(http, passes(ticket["run_id"], 1))
    stepped = http.post("/optim_step", json=optim_step(ticket["run_id"], 2)).json()

    assert result.status_code == 200
    assert ticket["run_id"] == f"{session_id}:train:7"
    assert retrieve(http, stepped["request_id"]).status_code == 200
    origin = _history(http, ticket["run_id"])["origin"]
    assert (origin["source"], origin["source_operation"]) == (model_id, 6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"step": 4}, "made 3 steps"),
        ({"operation": 5}, "last such operation before it is 4"),
        ({"operation": 99}, "not executed"),
        ({}, "either a step"),
        ({"step": 1, "operation": 2}, "either a step"),
        ({"step": -1}, "greater than or equal to 0"),
    ],
)
@pytest.mark.parametrize("verb", ["rewind", "fork"])
def test_a_state_that_cannot_be_had_is_refused_with_the_reason(
    http: httpx.Client, model_id: str, steps: list[str], verb: str, body: dict[str, int], words: str
) -> None:
    refused = _post(http, f"runs/{model_id}/{verb}", body)

    assert refused.status_code == 400
    assert words in refused.json()["detail"]
    assert _history(http, model_id)["num_steps"] == 3


@pytest.mark.parametrize("verb", ["rewind", "fork"])
def test_nobody_takes_back_somebody_elses_run(
    api: Api, http: httpx.Client, model_id: str, steps: list[str], verb: str
) -> None:
    with api.http(api.new_key()) as stranger:
        refused = _post(stranger, f"runs/{model_id}/{verb}", {"step": 1})
        unknown = _post(stranger, "runs/nobodys:train:0/" + verb, {"step": 1})
        history = stranger.get(f"{stranger.base_url.join('/api/native/v1/')}runs/{model_id}/history")

    assert (refused.status_code, unknown.status_code, history.status_code) == (404, 404, 404)
    assert refused.json()["detail"].replace(model_id, "nobodys:train:0") == unknown.json()["detail"]


def test_the_times_of_a_run_add_up_stretch_by_stretch(
    api: Api, http: httpx.Client, model_id: str, steps: list[str]
) -> None:
    route = str(http.base_url.join(f"/api/native/v1/runs/{model_id}/times"))

    whole, later, nothing = (http.get(route, params={"after": after}).json() for after in (-1, 3, 6))
    with api.http(api.new_key()) as stranger:
        hidden = stranger.get(route)

    assert [told["last_operation"] for told in (whole, later, nothing)] == [6, 6, 6]
    assert 0 < later["queue_s"] + later["compute_s"] < whole["queue_s"] + whole["compute_s"]
    assert (nothing["queue_s"], nothing["compute_s"]) == (0, 0)
    assert hidden.status_code == 404
