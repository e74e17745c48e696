"""Long polls: patience, wake-ups, and honesty about why nothing moves."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from harness.calls import optim_step, passes, retrieve, send_passes
from harness.polling import wait_for, wait_until
from twinkle.core.clock import SystemClock
from twinkle.storage.database import Database
from twinkle.storage.upkeep.upkeep import Upkeep

if TYPE_CHECKING:
    from conftest import Api, ServeApi


def test_a_poll_ends_with_408_and_the_next_one_brings_the_result(api: Api, http: httpx.Client, model_id: str) -> None:
    with api.worker.paused():
        ticket = http.post("/optim_step", json=optim_step(model_id, 1)).json()["request_id"]
        waiting = http.post("/retrieve_future", json={"request_id": ticket})

    assert waiting.status_code == 408
    assert waiting.json()["queue_state"] == "active"
    assert "next in line on mesh 'default'" in waiting.json()["queue_state_reason"]
    assert retrieve(http, ticket).json() == {"metrics": {"seq": 1}}


def test_all_polls_of_one_future_are_answered(api: Api, key: str, http: httpx.Client, model_id: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        with api.worker.paused():
            ticket = http.post("/optim_step", json=optim_step(model_id, 1)).json()["request_id"]
            polls = [pool.submit(lambda: retrieve(api.http(key), ticket).json()) for _ in range(8)]
        answers = [poll.result() for poll in polls]

    assert answers == [{"metrics": {"seq": 1}}] * 8


def test_a_result_that_was_kept_for_its_time_is_gone(api: Api, http: httpx.Client, model_id: str) -> None:
    ticket = http.post("/optim_step", json=optim_step(model_id, 1)).json()["request_id"]
    retrieve(http, ticket)
    Upkeep(Database(api.settings.resolved_database_url), SystemClock()).expire_results(older_than_s=-60)

    # A look into the journal that had begun before may still bring the result.
    gone = wait_for(lambda: _refused(http, ticket), what="a refusal")

    assert (gone.status_code, gone.json()["code"]) == (410, "expired")


def _refused(http: httpx.Client, ticket: str) -> httpx.Response | None:
    response = http.post("/retrieve_future", json={"request_id": ticket})
    return None if response.is_success else response


def test_a_large_result_is_announced_with_its_size_to_who_can_hear_it(http: httpx.Client, model_id: str) -> None:
    large = send_passes(http, passes(model_id, 1, length=3000)).json()["request_id"]
    small = http.post("/optim_step", json=optim_step(model_id, 2)).json()["request_id"]
    failed = http.post("/save_weights", json={"model_id": model_id, "seq_id": 3, "path": "no/slash"}).json()
    result = retrieve(http, large)

    def announced(request_id: str) -> dict[str, object]:
        retrieve(http, request_id)
        body = {"request_id": request_id, "allow_metadata_only": True}
        return dict(http.post("/retrieve_future", json=body).json())

    assert result.headers["content-type"] == "application/x-protobuf"
    assert announced(large) == {"status": "complete_metadata", "response_payload_size": len(result.content)}
    assert announced(small) == {"metrics": {"seq": 2}}
    assert announced(failed["request_id"])["category"] == "user"


def test_a_result_whose_blob_cannot_be_read_just_now_is_waited_for(api: Api, http: httpx.Client, model_id: str) -> None:
    body = passes(model_id, 1, length=3000, token=secrets.randbelow(2**30))
    ticket = send_passes(http, body).json()["request_id"]
    assert retrieve(http, ticket).status_code == 200
    blobs = Path(api.settings.resolved_object_store) / "results"
    hidden = blobs.rename(blobs.with_name("hidden"))

    waiting = http.post("/retrieve_future", json={"request_id": ticket})
    hidden.rename(blobs)

    assert (waiting.status_code, waiting.json()["queue_state"]) == (408, "paused_capacity")
    assert str(blobs.parent) not in waiting.text
    assert retrieve(http, ticket).status_code == 200


def test_a_poll_says_when_no_worker_is_there(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> None:
    with serve_api(make_database_url("sqlite"), long_poll_s=0.1) as served:
        not_ready = httpx.get(f"{served.url}/api/v1/readyz")
        client = served.http(served.new_key())
        session_id = client.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/one"}
        too_early = client.post("/create_model", json=body)
        served.worker.register()
        served.worker.release()
        ticket = client.post("/create_model", json=body).json()

        waiting = client.post("/retrieve_future", json={"request_id": ticket["request_id"]})

    assert (too_early.status_code, too_early.json()["code"]) == (503, "mesh_unavailable")
    assert too_early.headers["retry-after"] == "1"
    assert not_ready.status_code == 503
    assert not_ready.json()["reasons"] == ["no worker has said yet what it serves"]
    assert waiting.status_code == 408
    assert waiting.json()["queue_state"] == "paused_capacity"
    assert "no worker of mesh 'default' is running" in waiting.json()["queue_state_reason"]


def test_neither_readiness_nor_liveness_is_green_while_a_worker_is_gone_and_work_waits(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("sqlite"), stall_s=0.2) as served:
        served.worker.register()
        client = served.http(served.new_key())
        session_id = client.post("/create_session", json={}).json()["session_id"]
        idle = client.get("/livez")
        first, second = (client.get("/readyz", params={"mesh": name}) for name in ("default", "second"))
        served.worker.release()
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/one"})

        wait_until(lambda: client.get("/livez").status_code == 503, what="liveness is red")
        wait_until(lambda: client.get("/readyz").status_code == 503, what="readiness is red")
        stalled, other = client.get("/livez"), client.get("/livez", params={"mesh": "another"})

    assert (idle.status_code, idle.json()) == (200, {"status": "live", "reasons": []})
    assert (first.status_code, second.status_code) == (200, 503)
    assert second.json()["reasons"] == ["no worker of mesh 'second' has said yet what it serves"]
    assert "on mesh 'default' an operation waits" in stalled.json()["reasons"][0]
    assert other.status_code == 200


def test_a_stopping_server_lets_its_polls_go(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> None:
    answers: list[httpx.Response] = []
    with serve_api(make_database_url("sqlite"), long_poll_s=30) as served:
        served.worker.register()
        client = served.http(served.new_key())
        session_id = client.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/one"}
        poll = {"request_id": client.post("/create_model", json=body).json()["request_id"]}
        thread = threading.Thread(target=lambda: answers.append(client.post("/retrieve_future", json=poll)))
        thread.start()
        deadline = time.monotonic() + 10
        while served.state().queue.futures.num_waiting == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
    thread.join(timeout=5)

    assert time.monotonic() - started < 4
    assert [answer.status_code for answer in answers] == [408]
