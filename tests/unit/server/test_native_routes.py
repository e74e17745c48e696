"""Our own routes: many futures in one poll, and the number with which another process goes on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from harness.calls import optim_step, passes, retrieve, send_passes
from twinkle.wire.bodies.native import CollectedFuture, CollectResponse
from twinkle.wire.training_result import decode_forward_backward_output

if TYPE_CHECKING:
    from conftest import Api


def collect(http: httpx.Client, *request_ids: str, timeout_s: float = 1.0) -> dict[str, CollectedFuture]:
    response = http.post(
        f"{http.base_url.copy_with(path='/')}api/native/v1/futures/collect",
        json={"request_ids": request_ids, "timeout_s": timeout_s},
    )
    assert response.status_code == 200, response.text
    return {future.request_id: future for future in CollectResponse.model_validate_json(response.content).ended}


def test_one_poll_gives_the_outcomes_of_all_that_have_ended(http: httpx.Client, model_id: str) -> None:
    passed = send_passes(http, passes(model_id, 1)).json()["request_id"]
    failed = http.post("/optim_step", json={"model_id": model_id, "seq_id": 2}).json()["request_id"]
    retrieve(http, failed)

    ended = collect(http, passed, failed)

    result = ended[passed].result
    assert result is not None and decode_forward_backward_output(result).metrics == {"loss:sum": 1.0}
    assert (ended[failed].state, ended[failed].category) == ("failed", "user")
    assert "adam_params" in (ended[failed].error or "")


def test_a_poll_is_held_until_the_first_one_ends(api: Api, http: httpx.Client, model_id: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        with api.worker.paused():
            ids = [http.post("/optim_step", json=optim_step(model_id, seq)).json()["request_id"] for seq in (1, 2)]
            assert collect(http, *ids) == {}
            started = time.monotonic()
            held = pool.submit(collect, http, *ids, timeout_s=30)
        ended = held.result()

    assert ids[0] in ended
    assert time.monotonic() - started < 10


def test_a_strangers_future_looks_like_one_that_does_not_exist(api: Api, http: httpx.Client, model_id: str) -> None:
    with api.http(api.new_key()) as stranger:
        theirs = collect(stranger, f"{model_id}:req:0", "nobody:train:0:req:0")

    assert {future.state for future in theirs.values()} == {"unknown"}


def test_a_run_says_with_which_number_to_go_on(api: Api, http: httpx.Client, model_id: str) -> None:
    send_passes(http, passes(model_id, 1))
    http.post("/optim_step", json=optim_step(model_id, 2))

    run = http.get(f"{api.url}/api/native/v1/runs/{model_id}").json()

    assert (run["run_id"], run["next_seq"], run["rank"]) == (model_id, 3, 8)
    with api.http(api.new_key()) as stranger:
        assert stranger.get(f"{api.url}/api/native/v1/runs/{model_id}").status_code == 404


def test_runs_and_checkpoints_are_read_page_by_page_behind_cursors_that_are_nobody_elses(
    api: Api, http: httpx.Client, model_id: str
) -> None:
    for seq, name in enumerate(("a", "b", "c"), start=1):
        retrieve(
            http,
            http.post("/save_weights", json={"model_id": model_id, "seq_id": seq, "path": name}).json()["request_id"],
        )
    lists = {"checkpoints": "tinker_path", "runs": "run_id"}
    for name, key in lists.items():
        url, seen, cursor = f"{api.url}/api/native/v1/{name}", [], None
        whole = [one[key] for one in http.get(url, params={"limit": 1000}).json()[name]]
        while True:
            page = http.get(url, params={"limit": 2} | ({} if cursor is None else {"cursor": cursor})).json()
            seen += [one[key] for one in page[name]]
            cursor = page.get("cursor")
            if cursor is None:
                break
            with api.http(api.new_key()) as stranger:
                assert stranger.get(url, params={"cursor": cursor}).status_code == 400

        assert seen == whole and len(seen) == len(set(seen)), name
    paths = [f"tinker://{model_id}/weights/{name}" for name in ("c", "b", "a")]
    assert [path for path in whole_checkpoints(api, http) if path in paths] == paths


def whole_checkpoints(api: Api, http: httpx.Client) -> list[str]:
    answer = http.get(f"{api.url}/api/native/v1/checkpoints", params={"limit": 1000})
    return [one["tinker_path"] for one in answer.json()["checkpoints"]]


def test_an_operation_that_was_forgotten_is_gone_by_its_name_and_is_not_done_again(
    api: Api, http: httpx.Client, model_id: str
) -> None:
    request_id = send_passes(http, passes(model_id, 1)).json()["request_id"]
    retrieve(http, request_id)
    with api.stores.database.transaction() as transaction:
        transaction.execute("DELETE FROM operation WHERE request_id = ?", (request_id,))
        transaction.execute("UPDATE lane SET gone_seq = 1 WHERE id = ?", (model_id,))

    polled = retrieve(http, request_id)
    again = send_passes(http, passes(model_id, 1))
    collected = collect(http, request_id)[request_id]
    on = send_passes(http, passes(model_id, 2))

    for gone in (polled, again):
        assert gone.status_code == 410, gone.text
        assert f"operation {request_id} ended so long ago" in gone.json()["detail"]
    assert collected.state == "expired" and request_id in (collected.error or "")
    assert retrieve(http, on.json()["request_id"]).status_code == 200
    with api.http(api.new_key()) as stranger:
        assert retrieve(stranger, request_id).status_code == 404
