"""What a mesh by Megatron does not do is refused before it is accepted, by what is named, and leaves no hole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

from harness.calls import optim_step, retrieve, send_passes
from harness.clock import HandClock
from harness.fake_worker import BASE_MODEL, CAPABILITIES
from twinkle.core.clock import SystemClock
from twinkle.core.mesh import MeshAnnouncement
from twinkle.storage.journal.meshes import ANNOUNCED_S, Meshes
from twinkle.wire.training import ForwardBackwardBody, WireDatum, encode_forward_backward

if TYPE_CHECKING:
    from conftest import Api


@pytest.fixture
def megatron(api: Api) -> Iterator[None]:
    """The API's mesh has said so of itself; a model that is made looks anew."""
    worker = api.worker
    lease = worker.lease
    worker.stores.meshes.publish(lease, CAPABILITIES.model_copy(update={"engine": "megatron", "serves": "training"}))
    yield
    worker.stores.meshes.publish(lease, CAPABILITIES)


@pytest.mark.usefixtures("megatron")
def test_weights_to_sample_from_without_a_name_and_losses_over_embeddings_are_refused(
    api: Api, http: httpx.Client, session_id: str, request: pytest.FixtureRequest
) -> None:
    model_id: str = request.getfixturevalue("model_id")
    tokens = np.full(4, 5, dtype=np.int64)
    datum = WireDatum(tokens, {"labels": np.ones(1, dtype=np.float32)})
    embeds = encode_forward_backward(ForwardBackwardBody(model_id, 1, False, "InfonceLoss", {}, (datum, datum)))

    compared = send_passes(http, embeds).json()
    own = http.post(
        "/save_weights_for_sampler", json={"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 0}
    ).json()
    named = http.post("/save_weights_for_sampler", json={"model_id": model_id, "seq_id": 3, "path": "kept"}).json()
    stepped = http.post("/optim_step", json=optim_step(model_id, 4)).json()
    session = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampled = http.post("/create_sampling_session", json=session)

    assert "InfonceLoss compares embeddings" in retrieve(http, compared["request_id"]).json()["error"]
    assert "save the weights under a name" in retrieve(http, own["request_id"]).json()["error"]
    assert retrieve(http, named["request_id"]).json()["path"].endswith("/sampler_weights/kept")
    assert retrieve(http, stepped["request_id"]).json() == {"metrics": {"seq": 4}}
    assert sampled.status_code == 400 and "to train, not to sample from" in sampled.json()["detail"]
    refused = [claim.rejection is not None for claim in api.worker.executed_of(model_id)]
    assert refused == [False, True, True, False, False], "refused where they were accepted, each in its place"


@pytest.mark.usefixtures("megatron")
def test_the_embedding_task_of_the_twinkle_dialect_is_refused_and_takes_no_number(http: httpx.Client) -> None:
    http.headers["X-Twinkle-Session-Id"] = http.post("/twinkle/create_session", json={}).json()["session_id"]
    model = f"/model/{BASE_MODEL}/twinkle"
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    http.post(f"{model}/add_adapter_to_model", json={"adapter_name": "a", "config": config}).raise_for_status()
    row = {"input_ids": [1, 2, 3], "labels": [1, 1, 1]}

    embedded = http.post(f"{model}/forward_backward", json={"adapter_name": "a", "inputs": [row], "task": "embedding"})
    plain = http.post(f"{model}/forward_backward", json={"adapter_name": "a", "inputs": [row]})

    assert embedded.status_code == 400
    assert "task: is 'embedding', which the mesh of this adapter does not compute" in embedded.json()["detail"]
    assert plain.status_code == 200


def test_while_the_mesh_that_trains_starts_beside_one_that_samples_a_run_is_told_to_come_again(
    api: Api, http: httpx.Client, session_id: str
) -> None:
    meshes = api.stores.meshes
    meshes.publish(api.worker.lease, CAPABILITIES.model_copy(update={"serves": "samples"}))
    coming = MeshAnnouncement.of(model_name=BASE_MODEL, engine="megatron", serves="everything")
    meshes.announce("trains", coming)
    body = {"session_id": session_id, "model_seq_id": 77, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    try:
        created = http.post("/create_model", json=body)
        added = http.post(
            f"/model/{BASE_MODEL}/twinkle/add_adapter_to_model", json={"adapter_name": "early", "config": config}
        )
        # Its worker was killed without a word, so long ago that nobody waits for it any more.
        then = HandClock(SystemClock().now() - ANNOUNCED_S)
        Meshes(api.stores.database, then).announce("trains", coming)
        refused = http.post("/create_model", json=body)
    finally:
        meshes.withdraw("trains")
        meshes.publish(api.worker.lease, CAPABILITIES)
    accepted = http.post("/create_model", json=body)

    for answer in (created, added):
        assert answer.status_code == 503
        assert "is starting; try again in a moment" in answer.text
    assert refused.status_code == 400 and "to sample from, not to train" in refused.json()["detail"]
    assert accepted.status_code == 200
