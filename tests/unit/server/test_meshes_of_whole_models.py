"""A mesh that trains whole models takes one such run at a time, in either dialect, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL, CAPABILITIES

if TYPE_CHECKING:
    from conftest import Api, ServeApi

MODEL = f"/model/{BASE_MODEL}/twinkle"


@pytest.fixture
def whole(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    with serve_api(make_database_url("sqlite")) as api:
        api.worker.start()
        api.worker.stores.meshes.publish(
            api.worker.lease, CAPABILITIES.model_copy(update={"max_rank": 0, "serves": "whole-model"})
        )
        yield api
        api.worker.stop()


def _session(http: httpx.Client) -> str:
    body = {"tags": [], "sdk_version": "0.38.0", "type": "create_session"}
    return str(http.post("/create_session", json=body).json()["session_id"])


def _tinker(http: httpx.Client, session: str, number: int = 0, lora: object = None) -> httpx.Response:
    body = {"session_id": session, "model_seq_id": number, "base_model": BASE_MODEL, "lora_config": lora}
    return http.post("/create_model", json=body)


def test_one_run_of_either_dialect_has_it_and_others_are_refused_in_words(whole: Api) -> None:
    with whole.http(whole.new_key()) as mine, whole.http(whole.new_key()) as other:
        session = _session(mine)
        other.headers["X-Twinkle-Session-Id"] = _session(other)
        lora = _tinker(mine, session, lora={"rank": 4})
        created = _tinker(mine, session, lora={"rank": 0})
        model_id = retrieve(mine, created.json()["request_id"]).json()["model_id"]
        again = _tinker(mine, session, lora={"rank": 0})
        info = mine.post("/get_info", json={"model_id": model_id}).json()
        run = mine.get(f"/training_runs/{model_id}").json()
        second = _tinker(mine, session, number=1)
        called = other.post(f"{MODEL}/add_adapter_to_model", json={"adapter_name": "a", "config": None})
        adapter = other.post(f"{MODEL}/add_adapter_to_model", json={"adapter_name": "a", "config": {"r": 4}})
        sampled = mine.post(
            "/create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL},
        )
        opened = other.post(f"{MODEL}/create", json={})
        mine.post("/unload_model", json={"model_id": model_id})
        after = other.post(
            f"{MODEL}/add_adapter_to_model",
            json={"adapter_name": "a", "config": None, "gradient_accumulation_steps": 2},
        )
        listed = other.get("/twinkle/training_runs").json()["training_runs"]

    assert again.json()["request_id"] == created.json()["request_id"]
    assert (info["is_lora"], info.get("lora_rank")) == (False, None)
    assert (run["is_lora"], run.get("lora_rank")) == (False, None)
    for refused in (second, called):
        assert refused.status_code == 400
        assert "trains all weights of one run at a time, and is taken" in refused.json()["detail"]
    assert lora.status_code == sampled.status_code == 400 and adapter.status_code == 404
    for refused in (lora, sampled, adapter):
        assert "is served here to train all of its weights" in refused.json()["detail"]
    assert opened.status_code == after.status_code == 200
    assert [(run["is_lora"], run["lora_rank"]) for run in listed] == [(False, 0)]
    config = whole.stores.adapters.find(after.json()["training_run_id"]).config
    assert (config.is_whole_model, config.gradient_accumulation_steps, config.peft) == (True, 2, None)


def test_a_checkpoint_of_a_whole_model_is_loaded_there_and_not_sampled_from(whole: Api) -> None:
    with whole.http(whole.new_key()) as http:
        session = _session(http)
        model_id = retrieve(http, _tinker(http, session).json()["request_id"]).json()["model_id"]
        save = http.post("/save_weights", json={"model_id": model_id, "seq_id": 1, "path": "kept"}).json()
        path = retrieve(http, save["request_id"]).json()["path"]
        info = http.post("/weights_info", json={"tinker_path": path}).json()
        http.post("/unload_model", json={"model_id": model_id})
        sampled = http.post(
            "/create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
        )
        chat = http.post("/chat/completions", json={"model": path, "messages": [{"role": "user", "content": "x"}]})
        loaded = http.post("/load_weights", json={"session_id": session, "model_seq_id": 1, "path": path})
        run = retrieve(http, loaded.json()["request_id"]).json()["model_id"]

    assert (info["is_lora"], info.get("lora_rank")) == (False, None)
    for refused in (sampled, chat):
        assert refused.status_code == 400 and "is a whole model" in refused.text
    assert whole.stores.adapters.find(run).config.is_whole_model
