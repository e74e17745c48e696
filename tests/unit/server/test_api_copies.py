"""Copies of checkpoints: the same files under another path, for as long as anybody needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
import tinker

from harness.calls import optim_step
from harness.fake_worker import WEIGHTS

if TYPE_CHECKING:
    from conftest import Api


@pytest.fixture
def service(api: Api, key: str) -> Iterator[tinker.ServiceClient]:
    with api.sdk(key) as client:
        yield client


@pytest.fixture
def source(service: tinker.ServiceClient) -> str:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    return training.save_state("a").result().path


def _files(api: Api, path: str) -> bytes:
    checkpoint = api.worker.stores.checkpoints.find(path)
    return api.state().artifacts.blobs.get(checkpoint.files["adapter"].key)


def test_a_copy_is_a_run_of_its_own_on_the_same_files(api: Api, service: tinker.ServiceClient, source: str) -> None:
    rest = service.create_rest_client()

    copy = rest.copy_weights(source, "archive", ttl_seconds=7200).result()

    assert copy != source
    assert copy.endswith("/weights/a")
    first, second = (api.worker.stores.checkpoints.find(path) for path in (source, copy))
    assert first.files == second.files
    assert second.expires_at is not None and first.expires_at is None
    run = rest.get_training_run(copy.split("/")[2]).result()
    assert (run.base_model, run.lora_rank) == ("tiny/one", 4)
    again = service.create_training_client_from_state_with_optimizer(copy)
    assert again.get_info().lora_rank == 4


def test_files_live_as_long_as_one_of_them(api: Api, service: tinker.ServiceClient, source: str) -> None:
    rest = service.create_rest_client()
    copy, second = (rest.copy_weights(source, project).result() for project in ("p", "q"))
    key = api.worker.stores.checkpoints.find(copy).files["adapter"].key

    rest.delete_checkpoint_from_tinker_path(source).result()
    rest.delete_checkpoint_from_tinker_path(second).result()
    assert _files(api, copy) == WEIGHTS
    rest.delete_checkpoint_from_tinker_path(copy).result()

    with pytest.raises(KeyError):
        api.state().artifacts.blobs.get(key)


def test_others_copy_what_is_public_and_keep_it(api: Api, service: tinker.ServiceClient, source: str) -> None:
    with api.sdk(api.new_key()) as other:
        theirs = other.create_rest_client()
        with pytest.raises(tinker.NotFoundError):
            theirs.copy_weights(source, "p").result()
        with pytest.raises(tinker.NotFoundError):
            theirs.copy_weights(source, "p", weights_access_token="token").result()
        assert theirs.list_sessions().result().sessions == []

        rest = service.create_rest_client()
        rest.publish_checkpoint_from_tinker_path(source).result()
        copy = theirs.copy_weights(source, "p").result()
        rest.delete_checkpoint_from_tinker_path(source).result()

        assert _files(api, copy) == WEIGHTS
        with pytest.raises(tinker.NotFoundError):
            rest.get_weights_info_by_tinker_path(copy).result()
        assert [c.public for c in theirs.list_user_checkpoints().result().checkpoints] == [False]


def test_a_resend_is_the_same_copy(http: httpx.Client, service: tinker.ServiceClient, source: str) -> None:
    body = {"source_path": source, "destination_project_id": "p"}
    headers = {"X-Idempotency-Key": "once"}

    paths = {http.post("/copy_weights", json=body, headers=headers).json()["tinker_path"] for _ in range(3)}
    other = http.post("/copy_weights", json=body).json()["tinker_path"]

    assert len(paths) == 1
    assert other not in paths


def test_a_copy_takes_a_number_in_a_session_and_no_training(
    http: httpx.Client, session_id: str, source: str, service: tinker.ServiceClient
) -> None:
    namesake = service.create_lora_training_client(base_model="tiny/one", rank=4).save_state("a").result().path
    body = {"source_path": source, "session_id": session_id, "model_seq_id": 3}
    run_id = f"{session_id}:train:3"

    copied, again = (http.post("/copy_weights", json=body) for _ in range(2))
    other = http.post("/copy_weights", json=body | {"source_path": source[:-1] + "b"})
    other_a = http.post("/copy_weights", json=body | {"source_path": namesake})
    step = http.post("/optim_step", json=optim_step(run_id, 1))
    model = {"session_id": session_id, "model_seq_id": 3, "base_model": "tiny/one"}
    made = http.post("/create_model", json=model)

    assert copied.json() == again.json() == {"tinker_path": f"tinker://{run_id}/weights/a"}
    assert (other.status_code, other.json()["code"]) == (400, "conflict")
    assert (other_a.status_code, other_a.json()["code"]) == (400, "conflict")
    assert (step.status_code, made.status_code) == (404, 404)


@pytest.mark.parametrize("change", [{}, {"destination_project_id": "p", "source_path": "a"}, {"session_id": "s"}])
def test_a_bad_copy_is_refused(http: httpx.Client, change: dict[str, str]) -> None:
    body = {"source_path": "tinker://a:train:0/weights/a"} | change

    assert http.post("/copy_weights", json=body).status_code == 400
