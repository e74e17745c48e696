"""Sweeps and flows over our own routes: one request, one id to watch, refused before anything is stored."""

from __future__ import annotations

from typing import Any

import httpx

JOBS = "/api/native/v1/jobs"
SFT = {"model": "tiny/one", "data": "file-1"}


def _post(http: httpx.Client, body: object, path: str = "") -> httpx.Response:
    return http.post(http.base_url.join(f"{JOBS}{path}"), json=body)


def _get(http: httpx.Client, path: str, **query: Any) -> Any:
    return http.get(http.base_url.join(f"{JOBS}{path}"), params=query).json()


def _sweep(**spec: Any) -> dict[str, Any]:
    return {"kind": "sweep", "spec": {"template": {"kind": "sft", "spec": SFT}, **spec}}


def test_a_sweep_of_a_thousand_is_one_request_and_one_id_to_watch(http: httpx.Client) -> None:
    answer = _post(http, _sweep(parameters={"seed": list(range(1000))}, at_once=4))

    assert answer.status_code == 200, answer.text
    sweep = answer.json()
    assert (sweep["state"], sweep["progress"]) == ("waiting", {"done": 0, "total": 1000, "unit": "jobs"})
    told = _get(http, f"/{sweep['id']}/members")
    assert told["counts"] == {"queued": 1000}
    assert told["members"][7]["values"] == {"seed": 7}
    assert len(_get(http, "", parent=sweep["id"], limit=200)["jobs"]) == 200


def test_cancelling_a_sweep_cancels_what_it_is_made_of(http: httpx.Client) -> None:
    sweep = _post(http, _sweep(parameters={"rank": [8, 16]})).json()

    told = _post(http, None, f"/{sweep['id']}/cancel").json()

    assert told["cancel_requested"]
    assert _get(http, f"/{sweep['id']}/members")["counts"] == {"cancelled": 2}


def test_a_flow_is_shown_with_what_each_job_waits_for(http: httpx.Client) -> None:
    jobs = {"train": {"kind": "sft", "spec": SFT}, "more": {"kind": "sft", "spec": SFT, "after": {"train": "ok"}}}
    flow = _post(http, {"kind": "flow", "spec": {"jobs": jobs}}).json()

    told = _get(http, f"/{flow['id']}/members")

    assert [(one["name"], one["state"]) for one in told["members"]] == [("train", "queued"), ("more", "waiting")]


def test_what_is_wrong_within_a_sweep_or_a_flow_is_named_and_nothing_is_stored(http: httpx.Client) -> None:
    before = len(_get(http, "", limit=200)["jobs"])
    circle = {
        "a": {"kind": "sft", "spec": SFT, "after": {"b": "ok"}},
        "b": {"kind": "sft", "spec": SFT, "after": {"a": "ok"}},
    }
    refused = [
        _post(http, _sweep(parameters={"rnak": [8]})),
        _post(http, _sweep(parameters={"rank": [8]}, metrik="loss")),
        _post(http, _sweep(parameters={"rank": [0]})),
        _post(http, {"kind": "flow", "spec": {"jobs": circle}}),
        _post(http, {"kind": "flow", "spec": {"jobs": {"a": {"kind": "stf", "spec": SFT}}}}),
    ]

    details = [answer.json()["detail"] for answer in refused]
    assert {answer.status_code for answer in refused} == {400}, details
    assert "rnak: is no field" in details[0] and "did you mean rank?" in details[0]
    assert "metrik" in details[1] and "did you mean metric?" in details[1]
    assert "rank" in details[2] and "greater than or equal to 1" in details[2]
    assert "in a circle" in details[3]
    assert "'stf' is none of" in details[4] and "did you mean sft?" in details[4]
    assert len(_get(http, "", limit=200)["jobs"]) == before


def test_more_jobs_than_one_transaction_takes_are_refused_with_the_number(http: httpx.Client) -> None:
    many = [_sweep(parameters={"seed": list(range(1000))}) for _ in range(2)]

    answer = _post(http, {"jobs": many}, "/many")

    assert answer.status_code == 400
    assert "more than 2000 with all members" in answer.json()["detail"]
