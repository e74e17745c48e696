"""Attacks by keeping: sessions, runs, waiting operations and checkpoints without end are refused, with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import optim_step, passes, retrieve, send_passes
from harness.fake_worker import BASE_MODEL
from harness.polling import wait_for
from twinkle.core.clock import SystemClock
from twinkle.core.errors import DiskFull
from twinkle.server.access.scopes import check_room
from twinkle.storage.adapters.snapshots import Snapshot
from twinkle.storage.disks import Disks
from twinkle.storage.tenants.sessions import NewSession

if TYPE_CHECKING:
    from conftest import Api, ServeApi

LIMITS = {
    "tenant_max_sessions": 3,
    "tenant_max_runs": 2,
    "tenant_max_sampling_sessions": 3,
    "tenant_max_queued": 4,
    "tenant_max_checkpoints": 2,
    "tenant_max_kept_bytes": 100_000,
    "max_outstanding_samples": 2,
}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def tight(
    request: pytest.FixtureRequest, serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> Iterator[Api]:
    """A served app in which a tenant may keep little."""
    with serve_api(make_database_url(request.param), **LIMITS) as served:
        served.worker.start()
        yield served
        served.worker.stop()


@pytest.fixture
def client(tight: Api) -> Iterator[httpx.Client]:
    """A client of a tenant that has nothing yet."""
    with tight.http(tight.new_key()) as one:
        yield one


def _session(client: httpx.Client) -> httpx.Response:
    return client.post("/create_session", json={"tags": ["a"]})


def _run(client: httpx.Client, session: str, number: int) -> httpx.Response:
    body = {"session_id": session, "model_seq_id": number, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    answer = client.post("/create_model", json=body)
    if answer.status_code == 200:
        retrieve(client, answer.json()["request_id"])
    return answer


def test_sessions_have_an_end(client: httpx.Client) -> None:
    answers = [_session(client) for _ in range(4)]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert answers[-1].json()["code"] == "limit_reached"
    assert "3 may be" in answers[-1].json()["detail"] and "max_sessions" in answers[-1].json()["detail"]


def test_so_have_the_tags_of_one(client: httpx.Client) -> None:
    refused = client.post("/create_session", json={"tags": ["a" * 4000] * 5})

    assert refused.status_code == 400 and "tags: must have at most 16384 characters" in refused.json()["detail"]


def test_runs_have_an_end(client: httpx.Client) -> None:
    session = _session(client).json()["session_id"]
    answers = [_run(client, session, number) for number in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 400]
    for words in ("2 may be", "unload others and delete their checkpoints", "max_runs"):
        assert words in answers[-1].json()["detail"]


def _sampler(client: httpx.Client, session: str, number: int) -> httpx.Response:
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE_MODEL}
    return client.post("/create_sampling_session", json=body)


def _nameless(client: httpx.Client, run: str) -> httpx.Response:
    body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 9}
    return client.post("/save_weights_for_sampler", json=body)


def _completion(client: httpx.Client, run: str) -> httpx.Response:
    body = {"model": BASE_MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
    return client.post(str(client.base_url.copy_with(path="/v1/completions")), json=body)


def _twinkle_sample(client: httpx.Client, run: str) -> httpx.Response:
    named = {"adapter_name": "sampled", "config": {"peft_type": "LORA", "r": 8}}
    headers = {"X-Twinkle-Session-Id": run.partition(":")[0]}
    made = client.post(f"/model/{BASE_MODEL}/twinkle/add_adapter_to_model", json=named, headers=headers)
    assert made.status_code == 200, made.text
    body = {"inputs": [{"input_ids": [1, 2, 3]}], "sampling_params": {"max_tokens": 1}, "adapter_name": "sampled"}
    return client.post(f"/sampler/{BASE_MODEL}/twinkle/sample", json=body, headers=headers)


@pytest.mark.parametrize("door", [_nameless, _completion, _twinkle_sample])
def test_sampling_sessions_have_an_end_at_every_door_and_what_was_opened_passes(
    tight: Api, client: httpx.Client, door: Callable[[httpx.Client, str], httpx.Response]
) -> None:
    session = _session(client).json()["session_id"]
    run = _run(client, session, 0).json()["model_id"]
    answers = [_sampler(client, session, number) for number in (1, 2, 3, 4, 1)]
    refused = door(client, run)
    named = client.post("/save_weights_for_sampler", json={"model_id": run, "seq_id": 1, "path": "named"})
    with tight.http(tight.new_key()) as other:
        others = _sampler(other, _session(other).json()["session_id"], 1)

    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 200]
    assert answers[4].json() == answers[0].json()
    for answer in (answers[3], refused):
        assert answer.status_code == 400, answer.text
        for words in ("3 sampling sessions, and 3 may be", "delete checkpoints", "max_sampling_sessions"):
            assert words in answer.text
    assert (named.status_code, others.status_code) == (200, 200), named.text


def test_what_waits_has_an_end_and_there_is_room_again_when_it_has_run(tight: Api, client: httpx.Client) -> None:
    run = _run(client, _session(client).json()["session_id"], 0).json()["model_id"]
    with tight.worker.paused():
        answers = [client.post("/optim_step", json=optim_step(run, seq)) for seq in range(1, 7)]
    accepted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    for answer in accepted:
        retrieve(client, answer.json()["request_id"])

    assert len(accepted) + len(refused) == 6
    assert 3 <= len(accepted) <= 4
    assert "operations wait or run already, and 4 may" in refused[0].json()["detail"]
    assert refused[0].headers["retry-after"] == "1"


def test_checkpoints_have_an_end_and_deleting_one_makes_room(tight: Api, client: httpx.Client) -> None:
    run = _run(client, _session(client).json()["session_id"], 0).json()["model_id"]
    answers = []
    for seq in range(1, 4):
        answers.append(client.post("/save_weights", json={"model_id": run, "seq_id": seq, "path": f"a{seq}"}))
        if answers[-1].status_code == 200:
            retrieve(client, answers[-1].json()["request_id"])
            # What was counted some seconds ago is an under-estimate until then.
            tight.state().accounts.holdings.forget()

    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert "delete some" in answers[-1].json()["detail"]
    assert client.delete(f"/training_runs/{run}/checkpoints/weights/a1").status_code == 204
    tight.state().accounts.holdings.forget()
    again = client.post("/save_weights", json={"model_id": run, "seq_id": 3, "path": "a3"})
    assert again.status_code == 200, again.text


def test_what_runs_are_rebuilt_from_has_an_end_and_the_refusal_says_what_makes_room(
    tight: Api, client: httpx.Client
) -> None:
    run = _run(client, _session(client).json()["session_id"], 0).json()["model_id"]
    small = send_passes(client, passes(run, 1))
    tight.stores.snapshots.add(
        Snapshot(adapter=run, seq=1, blob=f"snapshots/{run}", size_bytes=100_000, created_at=SystemClock().now())
    )
    tight.state().accounts.holdings.forget()
    refused = send_passes(client, passes(run, 2))
    step = client.post("/optim_step", json=optim_step(run, 2))

    assert (small.status_code, refused.status_code, step.status_code) == (200, 400, 200), refused.text
    assert refused.json()["code"] == "limit_reached"
    for word in ("100000 may be", "max_kept_bytes", "unload_model"):
        assert word in refused.json()["detail"]
    assert client.post("/unload_model", json={"model_id": run}).status_code == 200


def test_so_have_samples_by_what_they_were_sent_with_until_their_results_go(tight: Api, client: httpx.Client) -> None:
    session = _session(client).json()["session_id"]
    sampler = _sampler(client, session, 1).json()["sampling_session_id"]

    def sample(seq: int) -> httpx.Response:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1000 + seq] * 8000}]}
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 1}}

        def taken_or_refused() -> httpx.Response | None:
            # How many wait is what was counted some moments ago.
            answer = client.post("/asample", json=body)
            return None if answer.status_code == 429 else answer

        answer = wait_for(taken_or_refused, what="room for a sample")
        if answer.status_code == 200:
            retrieve(client, answer.json()["request_id"])
        tight.stores.kept_payloads.count()
        tight.state().accounts.holdings.forget()
        return answer

    answers = [sample(seq) for seq in (0, 1, 2, 3, 4, 0)]
    tight.stores.upkeep.expire_results(older_than_s=-1)
    answers.append(sample(4))

    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 400, 200, 200], answers[3].text
    assert answers[3].json()["code"] == "limit_reached"
    for word in ("100000 may be", "max_kept_bytes", "what your samples were sent with"):
        assert word in answers[3].json()["detail"]
    assert answers[5].json() == answers[0].json()


def test_what_was_accepted_is_found_again_where_anything_new_is_refused(tight: Api, client: httpx.Client) -> None:
    keys = [{"X-Idempotency-Key": key} for key in ("a", "b", "c", "new")]
    sessions = [client.post("/create_session", json={}, headers=key) for key in (*keys, keys[0])]
    session = sessions[0].json()["session_id"]
    runs = [_run(client, session, number) for number in (0, 1, 2, 0)]
    run = runs[0].json()["model_id"]
    sent = [send_passes(client, passes(run, 1))]
    tight.stores.snapshots.add(
        Snapshot(adapter=run, seq=1, blob=f"snapshots/{run}", size_bytes=100_000, created_at=SystemClock().now())
    )
    tight.state().accounts.holdings.forget()
    sent += [send_passes(client, passes(run, number)) for number in (2, 1)]
    other_body = client.post("/optim_step", json=optim_step(run, 1))

    for answers in (sessions[2:], runs[1:], sent):
        assert [answer.status_code for answer in answers] == [200, 400, 200], [answer.text for answer in answers]
        assert "limit_reached" in answers[1].text
    assert sessions[-1].json() == sessions[0].json()
    assert runs[-1].json()["request_id"] == runs[0].json()["request_id"]
    assert sent[-1].json()["request_id"] == sent[0].json()["request_id"]
    assert other_body.status_code == 409 or "already used for a different" in other_body.text


def test_so_is_what_waits_where_no_more_may(tight: Api, client: httpx.Client) -> None:
    session = _session(client).json()["session_id"]
    run = _run(client, session, 0).json()["model_id"]
    opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler = client.post("/create_sampling_session", json=opened).json()["sampling_session_id"]
    sample = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 2},
    }
    with tight.worker.paused():
        drawn = [client.post("/asample", json={**sample, "seq_id": seq}) for seq in (0, 1, 2, 0)]
        steps = [client.post("/optim_step", json=optim_step(run, seq)) for seq in (1, 2, 3, 4, 5, 1)]
    too_many = [client.post("/asample", json={**sample, "seq_id": 0, "sampling_params": {"max_tokens": 2**30}})]

    for answers in (drawn, steps):
        assert (answers[0].status_code, answers[-2].status_code, answers[-1].status_code) == (200, 429, 200)
        assert answers[-1].json()["request_id"] == answers[0].json()["request_id"]
    assert "already used for a different" in too_many[0].text
    for answer in (*drawn, *steps):
        if answer.status_code == 200:
            retrieve(client, answer.json()["request_id"])


@pytest.mark.parametrize("by_key", [False, True], ids=["number", "key"])
@pytest.mark.parametrize("kind", ["fork", "copy", "adapter"])
def test_forks_copies_and_named_adapters_are_found_again_where_no_more_runs_may_be(
    client: httpx.Client, kind: str, by_key: bool
) -> None:
    session = _session(client).json()["session_id"]
    run = _run(client, session, 0).json()["model_id"]
    send_passes(client, passes(run, 1))
    client.post("/optim_step", json=optim_step(run, 2))
    save = client.post("/save_weights", json={"model_id": run, "seq_id": 3, "path": "kept"}).json()
    checkpoint = retrieve(client, save["request_id"]).json()["path"]

    def send(number: int) -> httpx.Response:
        headers = {"X-Idempotency-Key": f"k{number}"} if by_key else {}
        place = {} if by_key else {"session_id": session, "model_seq_id": number}
        root = client.base_url.join("/api")
        if kind == "fork":
            return client.post(f"{root}/native/v1/runs/{run}/fork", json={"step": 1, **place}, headers=headers)
        if kind == "copy":
            copy = {"source_path": checkpoint, **(place or {"destination_project_id": "archive"})}
            return client.post("/copy_weights", json=copy, headers=headers)
        named = {"adapter_name": f"a{number}", "config": {"peft_type": "LORA", "r": 8}}
        path = f"/model/{BASE_MODEL}/twinkle/add_adapter_to_model"
        return client.post(path, json=named, headers={**headers, "X-Twinkle-Session-Id": session})

    answers = [send(number) for number in (1, 2, 1)]

    assert [answer.status_code for answer in answers] == [200, 400, 200], [answer.text for answer in answers]
    assert "2 may be" in answers[1].text and "max_runs" in answers[1].text
    assert answers[2].json() == answers[0].json()


def test_sessions_of_which_nothing_is_kept_go_and_others_stay(tight: Api, client: httpx.Client) -> None:
    empty, used = (_session(client).json()["session_id"] for _ in range(2))
    _run(client, used, 0)

    assert tight.stores.sessions.forget(older_than_s=3600) == 0
    while tight.stores.sessions.forget(older_than_s=-1):
        pass

    assert client.get(f"/sessions/{empty}").status_code == 404
    assert client.get(f"/sessions/{used}").status_code == 200


class Disk:
    """A disk whose free bytes the test says."""

    def __init__(self) -> None:
        self.free_bytes = 1000

    def free(self, _: Path) -> int:
        return self.free_bytes


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.mark.parametrize(
    ("free_bytes", "method", "path", "goes_on"),
    [
        (1000, "POST", "/api/v1/asample", True),
        (99, "POST", "/api/v1/asample", False),
        (99, "POST", "/api/v1/forward_backward", False),
        (99, "POST", "/api/v1/create_session", False),
        (99, "POST", "/api/v1/session_heartbeat", True),
        (99, "POST", "/api/v1/retrieve_future", True),
        (99, "DELETE", "/v1/files/file-1", True),
        (9, "POST", "/api/v1/session_heartbeat", False),
        (9, "POST", "/api/v1/retrieve_future", True),
        (9, "GET", "/api/v1/training_runs", True),
        (9, "DELETE", "/api/v1/training_runs/a/checkpoints/weights/b", True),
        (9, "POST", "/api/v1/cancel_future", True),
    ],
)
def test_with_little_room_nothing_is_begun_and_with_none_only_reading_and_deleting_go_on(
    disk: Disk, tmp_path: Path, free_bytes: int, method: str, path: str, goes_on: bool
) -> None:
    disks = Disks([tmp_path], SystemClock(), low_bytes=100, critical_bytes=10, free=disk.free)
    disk.free_bytes = free_bytes

    if goes_on:
        check_room(disks, method, path)
    else:
        with pytest.raises(DiskFull):
            check_room(disks, method, path)


def test_a_served_app_without_room_refuses_in_the_one_form(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    marks = {"disk_low_bytes": 2**62, "disk_critical_bytes": 0}
    with serve_api(make_database_url("sqlite"), **marks) as api, api.http(api.new_key()) as client:
        refused = client.post("/create_session", json={})
        listed = client.get("/training_runs")

    assert (refused.status_code, refused.json()["code"]) == (503, "disk_full")
    assert listed.status_code == 200


def test_what_a_tenant_holds_is_counted(tight: Api) -> None:
    tenant = tight.stores.tenants.key(tight.new_key())
    assert tenant is not None
    tight.stores.sessions.open(tenant.tenant, NewSession())
    held = tight.stores.holdings.of(tenant.tenant)

    assert (held.num_sessions, held.num_runs, held.num_sampling_sessions) == (1, 0, 0)
    assert (held.num_open, held.num_checkpoints) == (0, 0)
    assert (held.open_bytes, held.checkpoint_bytes, held.kept_bytes) == (0, 0, 0)
