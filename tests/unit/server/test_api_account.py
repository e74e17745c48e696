"""What a tenant is told of its key, its use and its past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import httpx
import pytest
import tinker
from tinker import types

from harness.fake_worker import DEVICE_S, WEIGHTS
from harness.leftovers import sdk_client

if TYPE_CHECKING:
    from conftest import Api


@pytest.fixture
def service(api: Api, key: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(
        base_url=api.url, api_key=key, user_metadata={"team": "red"}, project_id="p1", display_name="Big Run"
    ) as client:
        yield client


@pytest.fixture
def admin(api: Api, key: str) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=api.url, api_key=key)


@pytest.fixture
def path(service: tinker.ServiceClient) -> str:
    """A checkpoint of a run that has trained on twice four tokens and sampled twice five from three."""
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4},
    )
    training.forward_backward([datum, datum], "cross_entropy").result()
    training.optim_step(types.AdamParams()).result()
    sampling = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    sampling.sample(prompt, 2, types.SamplingParams(max_tokens=5)).result()
    return training.save_state("a").result().path


def _today() -> tuple[datetime, datetime]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=1), hour + timedelta(hours=2)


def test_usage_is_what_was_trained_sampled_and_stored(admin: tinker.AdminClient, path: str) -> None:
    usage = admin.get_billing_usage(*_today()).result()

    seen = {event.event_info.type: event for event in usage.data}
    infos = {kind: event.event_info for kind, event in seen.items()}
    assert infos["training"].token_count == 8
    assert infos["sampling_prefill"].token_count == 3
    assert infos["sampling_sample"].token_count == 10
    assert infos["checkpoint"].count == 2
    assert 0 < infos["storage"].gigabyte_hours < len(WEIGHTS) / 1e9 / 60
    session_id = path.split("/")[2].split(":")[0]
    assert {(event.session_id, event.base_model, event.project_id) for event in usage.data} == {
        (session_id, "tiny/one", "p1")
    }
    assert usage.sessions[session_id].user_metadata == {"team": "red"}


def test_usage_knows_the_device_seconds(http: httpx.Client, path: str) -> None:
    start, end = _today()
    params = {"starting_on": start.isoformat(), "ending_before": end.isoformat()}

    events = http.get("/billing/usage/events", params=params).json()["data"]

    seconds = {event["event_info"]["type"]: event.get("device_seconds") for event in events}
    # Creation, pass, step and two saves; the sample by itself.
    assert seconds["training"] == pytest.approx(5 * DEVICE_S)
    assert seconds["sampling_sample"] == pytest.approx(DEVICE_S)


def test_what_was_deleted_has_been_stored_all_the_same(
    admin: tinker.AdminClient, service: tinker.ServiceClient, path: str
) -> None:
    service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()

    usage = admin.get_billing_usage(*_today()).result()

    # What is left are the weights that were saved for a sampling client.
    (left,) = admin.get_current_checkpoint_storage_usage().result().data
    assert (left.checkpoint_count, left.size_bytes) == (1, len(WEIGHTS))
    assert any(event.event_info.type == "storage" for event in usage.data)


def test_nobody_sees_anybody_elses_usage(api: Api, path: str) -> None:
    stranger = tinker.AdminClient(base_url=api.url, api_key=api.new_key())

    assert stranger.get_billing_usage(*_today()).result().data == []
    assert stranger.get_current_checkpoint_storage_usage().result().data == []
    assert [entry.event for entry in stranger.get_audit_log().result().entries] == ["apikey_create"]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("2026-01-01T00:30:00Z", "2026-01-02T00:00:00Z"),
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"),
    ],
)
def test_a_window_that_is_none_is_refused(http: httpx.Client, start: str, end: str) -> None:
    answer = http.get("/billing/usage/events", params={"starting_on": start, "ending_before": end})

    assert answer.status_code == 400


def test_what_is_stored_now_project_by_project(admin: tinker.AdminClient, path: str) -> None:
    (item,) = admin.get_current_checkpoint_storage_usage().result().data

    assert (item.project_id, item.checkpoint_count, item.size_bytes) == ("p1", 2, 2 * len(WEIGHTS))
    assert admin.get_current_checkpoint_storage_usage(project_id="p1").result().data == [item]
    assert admin.get_current_checkpoint_storage_usage(project_id="p2").result().data == []


def test_the_audit_log_tells_what_was_done(admin: tinker.AdminClient, service: tinker.ServiceClient, path: str) -> None:
    rest = service.create_rest_client()
    service.create_training_client_from_state(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    rest.delete_checkpoint_from_tinker_path(path).result()

    entries = admin.get_audit_log(event_type="checkpoints").result().entries

    done = [entry.event.removeprefix("checkpoint_") for entry in entries if entry.tinker_path == path]
    assert done == ["create", "read", "publish", "unpublish", "ttl_set", "delete"]
    assert admin.get_audit_log(event_type="teams").result().entries == []
    assert admin.get_audit_log(day=datetime.now(UTC).date() - timedelta(days=2)).result().entries == []


def test_sessions_are_found_by_what_is_known_of_them(service: tinker.ServiceClient, path: str) -> None:
    rest = service.create_rest_client()
    session_id = path.split("/")[2].split(":")[0]

    def search(**filters: object) -> list[types.SessionSummary]:
        return rest.search_sessions(types.SessionSearchRequest.model_validate(filters)).result().sessions

    (found,) = search(display_name="run BIG", user_metadata={"team": "red"}, project_ids=["p1"])

    assert (found.session_id, found.project_id, found.display_name) == (session_id, "p1", "Big Run")
    assert (found.checkpoints_count, found.checkpoint_storage_bytes) == (1, len(WEIGHTS))
    assert found.status is not None and found.status.type == "active"
    assert search(user_metadata={"team": "blue"}) == []
    assert search(display_name="small") == []
    assert [one.session_id for one in search(session_id=session_id)] == [session_id]


def test_runs_are_listed_by_project_and_the_one_with_the_latest_request_first(api: Api, key: str) -> None:
    rest = tinker.RestClient(base_url=api.url, api_key=key)
    clients = [sdk_client(api.url, key, project_id=name) for name in ("p1", "p2", None)]
    runs = [
        client.create_lora_training_client(base_model="tiny/one", rank=4).result() for client in (*clients, clients[0])
    ]
    for run in (runs[1], runs[0]):
        run.optim_step(types.AdamParams()).result()

    def listed(project_id: str | None = None, limit: int = 20) -> tuple[list[str], int]:
        answer = rest.list_training_runs(limit=limit, project_id=project_id).result()
        return [run.training_run_id for run in answer.training_runs], answer.cursor.total_count

    first, second, third, fourth = (run.model_id for run in runs)
    assert listed() == ([first, second, fourth, third], 4)
    assert listed(limit=2) == ([first, second], 4)
    assert listed("p1") == ([first, fourth], 2)
    assert listed("p2") == ([second], 1)
    assert listed("default") == ([third], 1)
    assert listed("p3") == ([], 0)
    for client in clients:
        client.close("success")


def test_a_session_tells_how_its_client_ended_and_goes_where_it_is_put(api: Api, key: str) -> None:
    rest = tinker.RestClient(base_url=api.url, api_key=key)
    with suppress(ZeroDivisionError), tinker.ServiceClient(base_url=api.url, api_key=key) as failing:
        run_id = failing.create_lora_training_client(base_model="tiny/one", rank=4).result().model_id
        raise ZeroDivisionError
    session_id = run_id.partition(":train:")[0]

    rest.assign_session_project(session_id, "moved").result()

    (found,) = rest.search_sessions(types.SessionSearchRequest(session_id=session_id)).result().sessions
    assert found.status is not None
    assert (found.project_id, found.status.type, found.status.reason.type) == ("moved", "client_finished", "errored")
    moved = rest.list_training_runs(project_id="moved").result().training_runs
    assert [run.training_run_id for run in moved] == [run_id]


def test_the_search_goes_page_by_page(http: httpx.Client) -> None:
    ids = [http.post("/create_session", json={"display_name": f"n{n}"}).json()["session_id"] for n in range(5)]
    http.post(f"/sessions/{ids[0]}/finish", json={"reason": {"type": "errored"}, "detail": "out of luck"})
    found: list[str] = []
    body: dict[str, object] = {"limit": 2, "user_metadata": {}}
    while True:
        page = http.post("/sessions/search", json=body).json()
        found += [one["session_id"] for one in page["sessions"]]
        if "next_cursor" not in page:
            break
        body["cursor"] = page["next_cursor"]

    def of_status(**query: object) -> list[str]:
        return [o["session_id"] for o in http.post("/sessions/search", json={"statuses": [query]}).json()["sessions"]]

    assert found == ids[::-1]
    assert of_status(type="client_finished") == of_status(type="client_finished", reasons=["errored"]) == [ids[0]]
    assert of_status(type="client_finished", reasons=["success"]) == of_status(type="failed") == []
    assert of_status(type="active") == ids[:0:-1]


def test_a_key_may_end_itself(api: Api, key: str) -> None:
    with api.http(key) as http:
        told = http.get("/auth/apikey/me").json()
        ended = http.delete("/auth/apikey/me")
        after = http.get("/auth/apikey/me")

    assert told["name"] == "test"
    assert isinstance(told["key_id"], int)
    assert told["details"]["org_details"]["name"].startswith("tenant-")
    assert (ended.status_code, after.status_code) == (204, 401)
