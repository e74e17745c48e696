"""Jobs over our own routes: submitted once however often they are sent, each tenant's own, followed without asking."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from twinkle.core.job import JobEvent, JobState
from twinkle.core.lease import ProcessIdentity
from twinkle.storage.jobs.jobs import Jobs

if TYPE_CHECKING:
    from conftest import Api

JOBS = "/api/native/v1/jobs"
SPEC = {"model": "tiny/one", "data": "file-1"}


def _job(**more: Any) -> dict[str, Any]:
    return {"kind": "ops", "spec": SPEC, **more}


def _submit(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post(http.base_url.join(JOBS), json=_job(**more))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _get(http: httpx.Client, path: str = "", **query: Any) -> httpx.Response:
    return http.get(http.base_url.join(f"{JOBS}{path}"), params=query)


def _post(http: httpx.Client, path: str, body: object = None, **headers: str) -> httpx.Response:
    return http.post(http.base_url.join(f"{JOBS}{path}"), json=body, headers=headers)


def test_a_job_is_shown_with_all_that_its_spec_left_to_the_defaults(http: httpx.Client) -> None:
    job = _submit(http, name="steps", metadata={"a": "b"}, priority=3, notify_url="https://example.com/hook")

    shown = _get(http, f"/{job['id']}").json()

    # When it may end is told anew each time, from now on.
    assert {**shown, "ends_at": None} == {**job, "ends_at": None}
    assert (shown["state"], shown["kind"], shown["name"], shown["priority"]) == ("queued", "ops", "steps", 3)
    assert shown["spec"]["rank"] == 32
    assert shown["metadata"] == {"a": "b"}
    assert not shown["is_final"]


def test_the_same_client_id_with_the_same_body_is_the_same_job(http: httpx.Client) -> None:
    first, again = _submit(http, client_id="mine"), _submit(http, client_id="mine")
    other = _post(http, "", _job(client_id="mine", name="another"))

    assert first["id"] == again["id"]
    assert (other.status_code, other.json()["code"]) == (400, "conflict")
    assert "'mine' was used for another job" in other.json()["detail"]
    assert len(_get(http).json()["jobs"]) == 1


def test_a_client_id_is_each_tenants_own(api: Api, http: httpx.Client) -> None:
    mine = _submit(http, client_id="nightly")
    with api.http(api.new_key()) as stranger:
        theirs = _submit(stranger, client_id="nightly", name="theirs")

    assert mine["id"] != theirs["id"]


def test_a_resend_without_a_client_id_is_known_by_its_idempotency_key(http: httpx.Client) -> None:
    key = {"x-idempotency-key": secrets.token_hex(8)}
    jobs = [_post(http, "", _job(), **key).json() for _ in range(2)]
    many = [_post(http, "/many", {"jobs": [_job(), _job()]}, **key).json()["jobs"] for _ in range(2)]

    assert jobs[0]["id"] == jobs[1]["id"]
    assert "client_id" not in jobs[0]
    assert [job["id"] for job in many[0]] == [job["id"] for job in many[1]]
    assert len({job["id"] for job in [*jobs, *many[0]]}) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"kind": "opps", "spec": {}}, "kind: 'opps' is none of"),
        ({"kind": "ops", "spec": {**SPEC, "ranc": 8}}, "spec.ranc: is not known here; did you mean rank?"),
        ({"kind": "ops", "spec": {"model": "tiny/one"}}, "spec.data: is missing"),
        ({"kind": "ops", "spec": SPEC, "aftr": []}, "aftr: is not known here; did you mean after?"),
        ({"kind": "ops", "spec": SPEC, "client_id": ""}, "client_id: must be 1 to 128"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_stored(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    one, many = _post(http, "", body), _post(http, "/many", {"jobs": [_job(), body]})

    assert (one.status_code, many.status_code) == (400, 400)
    assert words in one.json()["detail"]
    assert f"jobs[1].{words}" in many.json()["detail"]
    assert _get(http).json()["jobs"] == []


def test_a_thousand_jobs_are_taken_in_one_request_and_listed_in_pages_that_miss_none(
    api: Api, http: httpx.Client
) -> None:
    body = {"jobs": [_job(client_id=f"member-{number}") for number in range(1000)]}
    began = time.monotonic()
    created = _post(http, "/many", body).json()["jobs"]
    took_s = time.monotonic() - began

    seen, cursor = [], None
    while True:
        page = _get(http, limit=200, **({} if cursor is None else {"cursor": cursor})).json()
        seen += [job["client_id"] for job in page["jobs"]]
        cursor = page.get("cursor")
        if cursor is None:
            break

    assert [job["client_id"] for job in created] == [f"member-{number}" for number in range(1000)]
    assert seen == [f"member-{number}" for number in reversed(range(1000))]
    assert took_s < 20


def test_one_job_of_an_array_waits_for_another_by_its_client_id(http: httpx.Client) -> None:
    jobs = [_job(client_id="train"), _job(client_id="test", after=["train"])]
    train, test = _post(http, "/many", {"jobs": jobs}).json()["jobs"]
    later = _submit(http, after=[{"job": "train", "condition": "any"}])

    _post(http, f"/{train['id']}/cancel")

    assert (train["state"], test["state"], later["state"]) == ("queued", "waiting", "waiting")
    assert [job["id"] for job in _post(http, "/many", {"jobs": jobs}).json()["jobs"]] == [train["id"], test["id"]]


def test_a_job_to_wait_for_that_is_not_there_is_not_found(api: Api, http: httpx.Client) -> None:
    with api.http(api.new_key()) as stranger:
        theirs = _submit(stranger)["id"]

    for unknown in ("job-nowhere", theirs):
        refused = _post(http, "", _job(after=[unknown]))
        assert (refused.status_code, refused.json()["detail"]) == (404, f"no job {unknown!r}")


def test_a_listing_is_filtered_by_kind_state_and_parent(http: httpx.Client) -> None:
    kept, ended = _submit(http)["id"], _submit(http)["id"]
    _post(http, f"/{ended}/cancel")

    assert [job["id"] for job in _get(http, state="cancelled").json()["jobs"]] == [ended]
    assert [job["id"] for job in _get(http, kind="ops", state=["queued", "running"]).json()["jobs"]] == [kept]
    assert _get(http, kind="batch").json()["jobs"] == []
    assert _get(http, parent=kept).json()["jobs"] == []
    assert _get(http, state="gone").status_code == 422


def test_a_cursor_is_nobody_elses_and_cannot_be_made_up(api: Api, http: httpx.Client) -> None:
    for _ in range(2):
        _submit(http)
    cursor = _get(http, limit=1).json()["cursor"]

    with api.http(api.new_key()) as stranger:
        assert _get(stranger, cursor=cursor).status_code == 400
    assert _get(http, cursor="x" + cursor).status_code == 400
    assert len(_get(http, cursor=cursor).json()["jobs"]) == 1


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume", "retry"])
def test_nobody_sees_or_tells_somebody_elses_job(api: Api, http: httpx.Client, verb: str) -> None:
    job = _submit(http)["id"]
    with api.http(api.new_key()) as stranger:
        answers = [_get(stranger, f"/{job}"), _get(stranger, f"/{job}/events"), _post(stranger, f"/{job}/{verb}")]
        unknown = _get(stranger, "/job-nowhere")

    assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert {answer.json()["detail"].replace(job, "job-nowhere") for answer in answers} == {unknown.json()["detail"]}
    assert _get(http, f"/{job}").json()["state"] == "queued"


def test_a_job_is_paused_resumed_cancelled_and_tried_again(http: httpx.Client) -> None:
    job = _submit(http)["id"]

    states = [
        _post(http, f"/{job}/{verb}").json()["state"] for verb in ("pause", "resume", "cancel", "cancel", "retry")
    ]
    refused = _post(http, f"/{job}/retry")

    assert states == ["paused", "queued", "cancelled", "cancelled", "retrying"]
    assert (refused.status_code, refused.json()["code"]) == (400, "conflict")


def test_events_are_read_behind_a_number_and_a_poll_is_held_until_there_is_one(api: Api, http: httpx.Client) -> None:
    job = _submit(http)["id"]
    first = _get(http, f"/{job}/events").json()
    heard: dict[str, Any] = {}

    def follow() -> None:
        with httpx.Client(headers=http.headers, timeout=30) as other:
            url = http.base_url.join(f"{JOBS}/{job}/events")
            while not heard.get("events"):
                heard.update(other.get(url, params={"after": 1, "wait_s": 20}).json())

    following = threading.Thread(target=follow, daemon=True)
    following.start()
    _post(http, f"/{job}/pause")
    following.join(timeout=20)

    assert [event["number"] for event in first["events"]] == [1]
    assert (first["events"][0]["kind"], first["job"]["state"]) == ("status", "queued")
    assert [(event["number"], event["message"]) for event in heard["events"]] == [(2, "paused")]
    assert heard["job"]["state"] == "paused"


def test_a_poll_hears_what_a_runner_in_another_process_writes(api: Api, http: httpx.Client) -> None:
    job = _submit(http)["id"]
    claim = api.stores.running_jobs.claim(job, ProcessIdentity.current(), lease_s=60)
    assert claim is not None
    after = _get(http, f"/{job}/events").json()["events"][-1]["number"]

    events = [JobEvent(kind="metrics", message="step 1", data={"loss": 2.5})]
    api.stores.running_jobs.record(claim, progress={"done": 1, "total": 4}, events=events)
    news = _get(http, f"/{job}/events", after=after, wait_s=20).json()
    api.stores.running_jobs.finish(claim, JobState.SUCCEEDED, result={"file": "file-2"})
    ended = _get(http, f"/{job}/events", after=after + 1, wait_s=20).json()
    over = _get(http, f"/{job}/events", after=ended["events"][-1]["number"], wait_s=20).json()

    assert (news["events"][0]["data"], news["job"]["progress"]) == ({"loss": 2.5}, {"done": 1, "total": 4})
    assert (ended["job"]["state"], ended["job"]["result"]) == ("succeeded", {"file": "file-2"})
    assert over["events"] == []
    assert _get(http, f"/{job}").json()["attempts"][0]["outcome"] == "succeeded"


def test_the_schema_is_published_to_everybody(api: Api) -> None:
    schema = httpx.get(f"{api.url}{JOBS}/schema")

    assert schema.headers["content-type"] == "application/schema+json"
    assert "ops" in schema.json()["properties"]["kind"]["enum"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_job_is_told_no_older_than_its_events_and_its_end_with_the_last_of_them(
    moment: str, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled right before or right after its events are read."""
    job = _submit(http)["id"]
    events, cancelled = Jobs.events, list[int]()

    def read(jobs: Jobs, job_id: str, tenant: str, **behind: int) -> list[JobEvent]:
        found = events(jobs, job_id, tenant, **behind) if moment == "after" else None
        if not cancelled:
            cancelled.append(1)
            jobs.request_cancel(job_id, tenant)
        return events(jobs, job_id, tenant, **behind) if found is None else found

    monkeypatch.setattr(Jobs, "events", read)

    heard = _get(http, f"/{job}/events").json()

    assert cancelled
    assert heard["job"]["state"] == "cancelled"
    assert [event["message"] for event in heard["events"]][-1] == "cancelled"
