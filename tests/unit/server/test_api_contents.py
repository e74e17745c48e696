"""What a stranger was given on a published checkpoint, over HTTP, when the name comes to mean something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL, WEIGHTS, FakeWorker
from twinkle.core.errors import ConfigError
from twinkle.core.settings import load_settings

if TYPE_CHECKING:
    from conftest import Api, ServeApi

SECRET = b"what nobody but its owner may read"


class Owner:
    """A tenant that has published a checkpoint for training, ``x``, and one to take away, ``x`` too."""

    def __init__(self, api: Api, http: httpx.Client) -> None:
        self._worker: FakeWorker = api.worker
        self._http = http
        session_id = http.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
        self.run_id = str(http.post("/create_model", json=body).json()["model_id"])
        self._next_seq = 1
        self.save()
        self._save("save_weights_external")
        self.publish()

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/weights/x"

    def url(self, segment: str = "weights") -> str:
        return f"/training_runs/{self.run_id}/checkpoints/{segment}/x"

    def save(self, *, overwrite: bool = False) -> None:
        self._save("save_weights", overwrite=overwrite)

    def _save(self, route: str, **options: bool) -> None:
        body = {"model_id": self.run_id, "seq_id": self._next_seq, "path": "x", **options}
        self._next_seq += 1
        saved = retrieve(self._http, self._http.post(f"/{route}", json=body).json()["request_id"])
        assert saved.status_code == 200, saved.text

    def publish(self) -> None:
        for segment in ("weights", "external_weights"):
            assert self._http.post(f"{self.url(segment)}/publish").status_code == 204

    def unpublish(self) -> None:
        for segment in ("weights", "external_weights"):
            assert self._http.delete(f"{self.url(segment)}/publish").status_code == 204

    def unpublish_and_publish_again(self) -> None:
        self.unpublish()
        self.publish()

    def delete(self) -> None:
        for segment in ("weights", "external_weights"):
            assert self._http.delete(self.url(segment)).status_code == 204

    def delete_and_save_again(self) -> None:
        self.delete()
        self._worker.weights = SECRET
        self.save()
        self._save("save_weights_external")

    def delete_save_and_publish_again(self) -> None:
        self.delete_and_save_again()
        self.publish()

    def overwrite(self) -> None:
        # What is saved to be taken away cannot be overwritten.
        assert self._http.delete(self.url("external_weights")).status_code == 204
        self._worker.weights = SECRET
        self.save(overwrite=True)
        self._save("save_weights_external")

    def overwrite_and_publish_again(self) -> None:
        self.overwrite()
        self.publish()


ENDS: list[Callable[[Owner], None]] = [
    Owner.unpublish,
    Owner.unpublish_and_publish_again,
    Owner.delete,
    Owner.delete_and_save_again,
    Owner.delete_save_and_publish_again,
    Owner.overwrite,
    Owner.overwrite_and_publish_again,
]
for_each_end = pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)


@pytest.fixture
def mine(api: Api) -> Iterator[httpx.Client]:
    with api.http(api.new_key()) as client:
        yield client


@pytest.fixture
def owner(api: Api, mine: httpx.Client) -> Iterator[Owner]:
    yield Owner(api, mine)
    api.worker.weights = WEIGHTS


def _open(http: httpx.Client, session_id: str, path: str) -> str:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    return str(http.post("/create_sampling_session", json=body).json()["sampling_session_id"])


def _ask(http: httpx.Client, sampler: str, seq: int) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    return str(http.post("/asample", json=body).json()["request_id"])


def _complete(http: httpx.Client, path: str, **headers: str) -> httpx.Response:
    url = str(http.base_url).replace("/api/v1/", "/v1/completions")
    return http.post(url, json={"model": path, "prompt": [1, 2], "max_tokens": 2}, headers=headers)


@for_each_end
def test_a_strangers_samples_end_those_that_wait_too(
    api: Api, http: httpx.Client, session_id: str, owner: Owner, end: Callable[[Owner], None]
) -> None:
    sampler = _open(http, session_id, owner.path)
    drawn = retrieve(http, _ask(http, sampler, 0))
    with_key = _complete(http, owner.path, **{"Idempotency-Key": f"once-{session_id}"})

    end(owner)
    after = retrieve(http, _ask(http, sampler, 1))
    by_name = _complete(http, owner.path)

    assert (drawn.status_code, with_key.status_code) == (200, 200)
    assert after.json()["category"] == "user" and "not there any more" in after.json()["error"]
    is_public = end.__name__.endswith("publish_again")
    assert by_name.status_code == (200 if is_public else 404)
    if is_public:
        again = _complete(http, owner.path, **{"Idempotency-Key": f"once-{session_id}"})
        assert again.json()["id"] == with_key.json()["id"], "a repeat is answered with what was drawn then"
    assert http.get(f"/samplers/{sampler}").json()["model_path"] == owner.path


@for_each_end
def test_download_urls_end_between_two_parts(http: httpx.Client, owner: Owner, end: Callable[[Owner], None]) -> None:
    (file_url,) = http.get(f"{owner.url('external_weights')}/external_weights_urls").json()["urls"].values()
    archive_url = http.get(f"{owner.url()}/archive", follow_redirects=False).headers["location"]
    first = [httpx.get(url, headers={"Range": "bytes=0-9"}) for url in (file_url, archive_url)]

    end(owner)
    rest = [httpx.get(url, headers={"Range": "bytes=10-"}) for url in (file_url, archive_url)]
    heads = [httpx.head(url) for url in (file_url, archive_url)]

    assert [answer.status_code for answer in first] == [206, 206]
    assert [answer.status_code for answer in (*rest, *heads)] == [404] * 4
    assert all(SECRET not in answer.content for answer in rest)


@for_each_end
def test_the_owners_urls_end_too(mine: httpx.Client, owner: Owner, end: Callable[[Owner], None]) -> None:
    url = mine.get(f"{owner.url()}/archive", follow_redirects=False).headers["location"]

    end(owner)

    assert httpx.get(url).status_code == 404


@for_each_end
def test_a_load_is_bound_to_what_was_there_when_it_was_accepted(
    api: Api, http: httpx.Client, session_id: str, model_id: str, owner: Owner, end: Callable[[Owner], None]
) -> None:
    begin = {"session_id": session_id, "model_seq_id": 5, "path": owner.path}
    into = {"model_id": model_id, "seq_id": 1, "path": owner.path}
    before = api.worker.stores.checkpoints.find(owner.path).content

    first = [http.post("/load_weights", json=body).json()["request_id"] for body in (begin, into)]
    end(owner)
    again = [http.post("/load_weights", json=body).json()["request_id"] for body in (begin, into)]

    for request_id in first:
        retrieve(http, request_id)
    loads = [claim for claim in api.worker.executed if claim.request_id in first]
    assert again == first
    assert [b'"content":"%s"' % before.encode() in api.worker.payload(claim) for claim in loads] == [True, True]


def test_a_run_loads_what_it_is_about_to_save(api: Api, mine: httpx.Client, owner: Owner) -> None:
    body = {"model_id": owner.run_id, "seq_id": 3, "path": owner.path}

    retrieve(mine, mine.post("/load_weights", json=body).json()["request_id"])

    (load,) = (claim for claim in api.worker.executed_of(owner.run_id) if claim.seq == 3)
    assert api.worker.payload(load) == b'{"path":"%s","optimizer":false}' % owner.path.encode()


def test_overwriting_what_is_public_is_told_in_the_audit_log(mine: httpx.Client, owner: Owner) -> None:
    owner.overwrite()

    described = mine.get(f"/training_runs/{owner.run_id}/checkpoints").json()["checkpoints"]
    assert [one["public"] for one in described] == [False, False]
    entries = [entry for entry in mine.get("/audit").json()["entries"] if entry["event"] == "checkpoint_unpublish"]
    assert [entry["event_details"]["reason"] for entry in entries] == ["overwritten"]


def test_a_session_is_opened_anew_on_what_is_there_now(http: httpx.Client, session_id: str, owner: Owner) -> None:
    _open(http, session_id, owner.path)
    owner.overwrite_and_publish_again()
    body = {"session_id": session_id, "sampling_session_seq_id": 1, "model_path": owner.path}

    sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]

    assert retrieve(http, _ask(http, sampler, 0)).status_code == 200


# -- what nobody can take back ----------------------------------------------------------------------------------------


def test_a_url_of_the_bucket_works_for_an_hour_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_PRESIGNED_URL_TTL_S", "3600")
    assert load_settings().presigned_url_ttl_s == 3600

    monkeypatch.setenv("TWINKLE_PRESIGNED_URL_TTL_S", "3601")
    with pytest.raises(ConfigError, match=r"TWINKLE_PRESIGNED_URL_TTL_S: .*3600"):
        load_settings()


def test_only_owners_are_sent_to_the_bucket_and_not_for_long(
    serve_api: ServeApi, make_database_url: Callable[[str], str], s3_url: str
) -> None:
    with serve_api(make_database_url("sqlite"), object_store=s3_url, presign_downloads=True) as api:
        api.worker.start()
        with api.http(api.new_key()) as mine, api.http(api.new_key()) as http:
            owner = Owner(api, mine)
            route = f"{owner.url('external_weights')}/external_weights_urls"
            to_owner, to_stranger = (client.get(route).json()["urls"]["adapter"] for client in (mine, http))

            assert not to_owner.startswith(api.url) and to_stranger.startswith(api.url)
            assert "X-Amz-Expires=900" in to_owner
            assert [httpx.get(url).content for url in (to_owner, to_stranger)] == [WEIGHTS, WEIGHTS]
            owner.unpublish()
            assert httpx.get(to_stranger).status_code == 404
        api.worker.stop()
