"""Weights access tokens over HTTP: with one, a key reads somebody else's checkpoint; a wrong one tells nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest
import tinker

from harness.calls import retrieve
from twinkle.client import Client
from twinkle.client.errors import NotFound
from twinkle.core.actor import key_actor
from twinkle.core.operation import OperationKind

if TYPE_CHECKING:
    from conftest import Api

HEADER = "X-Tinker-Weights-Access-Token"


@dataclass(frozen=True)
class Owner:
    """Somebody with a run that has two checkpoints for training and one for sampling."""

    key: str
    client: Client
    http: httpx.Client
    run_id: str

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/weights/first"

    @property
    def other_path(self) -> str:
        return f"tinker://{self.run_id}/weights/second"

    @property
    def sampler_path(self) -> str:
        return f"tinker://{self.run_id}/sampler_weights/drawn"

    def token(self, **target: str) -> str:
        return self.client.create_access_token(**target).token  # type: ignore[arg-type]


@pytest.fixture
def owner(api: Api) -> Iterator[Owner]:
    key = api.new_key()
    with Client(api.url, key) as client, api.http(key) as http:
        run = client.create_run("tiny/one", rank=4)
        for save in (run.save_state("first"), run.save_state("second"), run.save_weights_for_sampler("drawn")):
            save.result(timeout=30)
        yield Owner(key, client, http, run.id)


@pytest.fixture
def service(api: Api, key: str) -> Iterator[tinker.ServiceClient]:
    """Another tenant, with the official client."""
    with api.sdk(key) as client:
        yield client


def test_the_official_client_begins_loads_and_copies_with_a_token(
    api: Api, http: httpx.Client, owner: Owner, service: tinker.ServiceClient
) -> None:
    token = owner.token(path=owner.path)

    begun = service.create_training_client_from_state(owner.path, weights_access_token=token)
    exact = service.create_training_client_from_state_with_optimizer(owner.path, weights_access_token=token)
    begun.load_state(owner.path, weights_access_token=token).result()
    begun.load_state_with_optimizer(owner.path, weights_access_token=token).result()
    rest = service.create_rest_client()
    copy = rest.copy_weights(owner.path, "p", weights_access_token=token).result()
    of_copy = service.create_training_client_from_state(copy)

    assert [client.get_info().lora_rank for client in (begun, exact, of_copy)] == [4] * 3
    executed = [*api.worker.executed_of(begun.model_id), *api.worker.executed_of(exact.model_id)]
    assert [claim.kind for claim in executed] == [OperationKind.LOAD_WEIGHTS] * 4
    payloads = [api.worker.payload(claim) for claim in executed]
    assert all(b'"grant"' in payload and token.encode() not in payload for payload in payloads)
    made, *theirs = [entry["event_details"] for entry in http.get("/audit").json()["entries"]]
    (info,) = owner.client.access_tokens()
    assert made["name"] == "test"
    assert [details.get("token_id") for details in theirs] == [info.token_id] * 5 + [None]
    used = [entry for entry in owner.http.get("/audit").json()["entries"] if entry["event"] == "checkpoint_token_use"]
    assert [entry["event_details"]["purpose"] for entry in used] == ["load"] * 4 + ["copy"]
    assert token not in owner.http.get("/audit").text + http.get("/audit").text


def test_a_token_of_a_run_opens_all_its_checkpoints_by_the_native_client_too(api: Api, key: str, owner: Owner) -> None:
    token = owner.token(run_id=owner.run_id)

    with Client(api.url, key) as reader:
        run = reader.resume_run(owner.path, access_token=token)
        loaded = run.load_state(owner.sampler_path, with_optimizer=False, access_token=token).result(timeout=30)
        begun = run.begun
        assert begun is not None and begun.result(timeout=30).path == owner.path
        with pytest.raises(NotFound):
            reader.resume_run(owner.path)

    assert loaded.path == owner.sampler_path


def _refusals(http: httpx.Client, session_id: str, number: int, path: str, token: str | None) -> list[str]:
    """What the two ways that ask at once answer, without what the caller has written itself."""
    load = {"session_id": session_id, "model_seq_id": number, "path": path}
    headers = {} if token is None else {HEADER: token}
    answers = [
        http.post("/load_weights", json=load | ({} if token is None else {"weights_access_token": token})),
        http.post("/copy_weights", json={"source_path": path, "destination_project_id": "p"}, headers=headers),
    ]
    return [f"{answer.status_code} {answer.text}".replace(path, "PATH") for answer in answers]


def test_a_wrong_token_answers_like_a_checkpoint_that_is_not_there(
    api: Api, http: httpx.Client, session_id: str, owner: Owner
) -> None:
    other_run = owner.client.create_run("tiny/one", rank=4)
    other_run.save_state("first").result(timeout=30)
    revoked = owner.client.create_access_token(path=owner.path)
    owner.client.revoke_access_token(revoked.token_id)
    over = owner.client.create_access_token(path=owner.path)
    with api.worker.journal.database.transaction() as transaction:
        transaction.execute("UPDATE access_token SET expires_at = 1 WHERE id = ?", (over.token_id,))
    deleted = owner.token(path=owner.other_path)
    owner.http.delete(f"/training_runs/{owner.run_id}/checkpoints/weights/second")
    wrong = {
        "none": (owner.path, None),
        "nonsense": (owner.path, "wat-nonsense"),
        "empty": (owner.path, ""),
        "another run's": (owner.path, owner.token(run_id=other_run.id)),
        "another checkpoint's": (owner.path, owner.token(path=owner.sampler_path)),
        "revoked": (owner.path, revoked.token),
        "over": (owner.path, over.token),
        "of what was deleted": (owner.other_path, deleted),
        "the owner's key": (owner.path, owner.key),
        "an id": (owner.path, over.token_id),
    }

    absent = _refusals(http, session_id, 1, f"tinker://{owner.run_id}/weights/absent", owner.token(run_id=owner.run_id))

    assert [answer[:3] for answer in absent] == ["404", "404"]
    for why, (path, token) in wrong.items():
        assert _refusals(http, session_id, 1, path, token) == absent, why
    assert http.get("/sessions").json()["sessions"] == [session_id]


def test_a_load_into_a_run_keeps_its_number_and_no_leave_that_was_not_given(
    api: Api, http: httpx.Client, model_id: str, owner: Owner
) -> None:
    bodies = [
        {"model_id": model_id, "seq_id": seq, "path": owner.path, "weights_access_token": token}
        for seq, token in enumerate(("wat-nonsense", owner.token(path=owner.other_path)), start=1)
    ]

    tickets = [http.post("/load_weights", json=body) for body in bodies]

    assert [ticket.status_code for ticket in tickets] == [200, 200]
    for ticket in tickets:
        retrieve(http, ticket.json()["request_id"])
    payloads = [api.worker.payload(claim) for claim in api.worker.executed_of(model_id)[1:]]
    assert payloads == [b'{"path":"%s","optimizer":false}' % owner.path.encode()] * 2


def test_what_was_accepted_is_found_again_after_its_token_has_ended(
    api: Api, http: httpx.Client, session_id: str, model_id: str, owner: Owner
) -> None:
    token = owner.client.create_access_token(path=owner.path)
    begin = {"session_id": session_id, "model_seq_id": 7, "path": owner.path, "weights_access_token": token.token}
    into = {"model_id": model_id, "seq_id": 1, "path": owner.path, "weights_access_token": token.token}
    copy = {"source_path": owner.path, "destination_project_id": "p"}
    headers = {HEADER: token.token, "X-Idempotency-Key": f"once-{session_id}"}

    def send() -> list[dict[str, str]]:
        answers = [http.post("/load_weights", json=body) for body in (begin, into)]
        answers.append(http.post("/copy_weights", json=copy, headers=headers))
        return [dict(answer.json()) for answer in answers]

    with api.worker.paused():
        first = send()
        owner.client.revoke_access_token(token.token_id)
        again = send()
    outcomes = [retrieve(http, ticket["request_id"]) for ticket in first[:2]]

    assert again == first
    assert [outcome.status_code for outcome in outcomes] == [200, 200]
    other = http.post("/load_weights", json=begin | {"optimizer": True})
    assert (other.status_code, other.json()["code"]) == (400, "conflict")
    assert http.post("/load_weights", json=begin | {"model_seq_id": 8}).status_code == 404


def test_sampler_weights_are_loaded_without_an_optimizer_only(
    http: httpx.Client, session_id: str, owner: Owner
) -> None:
    body = {"session_id": session_id, "model_seq_id": 1, "path": owner.sampler_path}
    body["weights_access_token"] = owner.token(path=owner.sampler_path)

    refused = http.post("/load_weights", json=body | {"optimizer": True})
    accepted = http.post("/load_weights", json=body)

    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_input")
    assert refused.json()["detail"].startswith("optimizer: ")
    assert accepted.status_code == 200


def test_a_token_is_shown_once_listed_and_revoked(owner: Owner) -> None:
    made = owner.client.create_access_token(path=owner.path, name="bob", ttl_s=3600)
    of_run = owner.client.create_access_token(run_id=owner.run_id)

    listed = owner.client.access_tokens(owner.run_id)
    revoked = [owner.client.revoke_access_token(made.token_id) for _ in range(2)]

    assert made.token.startswith("wat-") and made.token not in repr(made)
    assert (made.path, made.run_id, made.name) == (owner.path, owner.run_id, "bob")
    assert (made.expires_at - made.created_at).total_seconds() == pytest.approx(3600)
    assert {one.token_id: one.path for one in listed} == {made.token_id: owner.path, of_run.token_id: None}
    assert revoked[0] == revoked[1] and revoked[0].revoked_at is not None
    assert owner.client.access_tokens("absent") == []


def test_tokens_are_their_owners_alone(api: Api, http: httpx.Client, owner: Owner) -> None:
    made = owner.client.create_access_token(run_id=owner.run_id)
    url = f"{api.url}/api/native/v1/access_tokens"

    refused = [
        http.delete(f"{url}/{made.token_id}"),
        http.post(url, json={"run_id": owner.run_id}),
        http.post(url, json={"path": owner.path}),
    ]
    bad = [
        http.post(url, json=body)
        for body in ({}, {"path": owner.path, "run_id": "a"}, {"path": "a"}, {"run_id": "a", "ttl_seconds": 0})
    ]

    assert [answer.status_code for answer in refused] == [404] * 3
    assert [answer.status_code for answer in bad] == [400] * 4
    assert http.get(url).json() == {"tokens": []}
    assert httpx.get(url).status_code == 401


def test_everybody_samples_from_a_public_checkpoint_and_publishing_twice_changes_nothing(
    owner: Owner, service: tinker.ServiceClient
) -> None:
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path=owner.sampler_path).get_base_model()
    url = f"/training_runs/{owner.run_id}/checkpoints/sampler_weights/drawn/publish"
    published = [owner.http.post(url).status_code for _ in range(2)]

    sampling = service.create_sampling_client(model_path=owner.sampler_path)
    assert sampling.get_base_model() == "tiny/one"
    prompt = tinker.ModelInput.from_ints([1, 2])
    drawn = sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=3)).result()
    unpublished = [owner.http.delete(url).status_code for _ in range(2)]
    with pytest.raises(tinker.TinkerError, match="not there any more"):
        sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=3)).result()

    assert published == unpublished == [204, 204]
    assert len(drawn.sequences[0].tokens) == 3
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path=owner.sampler_path).get_base_model()


def test_whatever_an_owner_makes_publishes_revokes_and_deletes_is_written_down_with_the_key_that_did_it(
    api: Api, owner: Owner
) -> None:
    checkpoint = f"/training_runs/{owner.run_id}/checkpoints/weights/first"
    token = owner.client.create_access_token(path=owner.path)
    root = owner.http.base_url.join("/")
    sent = {"file": ("rows.jsonl", b'{"a": 1}'), "purpose": (None, "fine-tune")}
    file = owner.http.post(f"{root}v1/files", files=sent, headers={"Authorization": f"Bearer {owner.key}"}).json()["id"]
    answers = [
        owner.http.post(f"{checkpoint}/publish"),
        owner.http.delete(f"{checkpoint}/publish"),
        owner.http.delete(f"{root}api/native/v1/access_tokens/{token.token_id}"),
        owner.http.delete(checkpoint),
        owner.http.delete(f"{root}v1/files/{file}", headers={"Authorization": f"Bearer {owner.key}"}),
    ]
    tenant = api.stores.tenants.key(owner.key)
    assert tenant is not None

    told = api.stores.audit.entries(tenant.tenant, start=0, end=2e10)

    assert [answer.is_success for answer in answers] == [True] * 5, [answer.text for answer in answers]
    done = ["publish", "unpublish", "token_revoke", "delete"]
    assert [one.event for one in told if one.event.startswith("checkpoint_")][-5:] == [
        "checkpoint_token_create",
        *(f"checkpoint_{verb}" for verb in done),
    ]
    assert told[-1].event == "file_delete" and told[-1].details == {"file": file}
    assert {one.actor for one in told[-6:]} == {key_actor(api.stores.keyring.find(owner.key).id)}
    assert "first" in str(told[-2].details) and all(one.at > 0 for one in told)
