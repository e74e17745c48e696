"""Flower shows every operation as a task of its own, to those who know the password, and never any data."""

from __future__ import annotations

import ast
import re

import httpx
import pytest
import tinker

from harness.polling import wait_for
from harness.served import Served

TOKENS = [201, 202, 203, 204]


@pytest.fixture(scope="module")
def flower(served: Served) -> httpx.Client:
    url = re.search(r"Flower\s+(http://\S+)", served.logs()).group(1)
    password = (served.home / "flower-password").read_text().strip()
    return httpx.Client(base_url=url, auth=("twinkle", password), timeout=10)


@pytest.fixture(scope="module")
def run(served: Served) -> tinker.TrainingClient:
    run = served.client("watched").create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    inputs = {"target_tokens": TOKENS, "weights": [1.0] * 4}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)
    run.forward_backward([datum], "cross_entropy").result()
    run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    with pytest.raises(tinker.RequestFailedError):
        run.forward_backward([datum], "no_such_loss").result()
    return run


def tasks_of(flower: httpx.Client, adapter: str) -> dict[str, dict]:
    tasks = flower.get("/api/tasks", params={"limit": 500}).raise_for_status().json()
    return {uuid: task for uuid, task in tasks.items() if uuid.startswith(adapter)}


def test_every_operation_is_a_task_with_state_runtime_retries_and_whose_it_is(
    flower: httpx.Client, run: tinker.TrainingClient
) -> None:
    tasks = wait_for(lambda: (found := tasks_of(flower, run.model_id)) and len(found) == 4 and found, what="4 tasks")

    by_seq = {uuid.rpartition(":")[2]: task for uuid, task in tasks.items()}
    assert {seq: (task["name"], task["state"]) for seq, task in by_seq.items()} == {
        "0": ("twinkle.create_model", "SUCCESS"),
        "1": ("twinkle.forward_backward", "SUCCESS"),
        "2": ("twinkle.optim_step", "SUCCESS"),
        "3": ("twinkle.forward_backward", "FAILURE"),
    }
    passed = by_seq["1"]
    assert passed["runtime"] > 0
    assert passed["retries"] == 0
    assert run.model_id in passed["kwargs"]
    assert "'seq': 1" in passed["kwargs"]
    assert "'tenant': 'watched'" in passed["kwargs"]


def test_a_task_says_whose_it_is_and_holds_no_data(flower: httpx.Client, run: tinker.TrainingClient) -> None:
    for task in tasks_of(flower, run.model_id).values():
        facts = ast.literal_eval(task["kwargs"])
        assert set(facts) == {"tenant", "adapter", "seq", "attempt"}
        assert facts["tenant"] == "watched"
        assert task["args"] == f"watched, {run.model_id[:8]}:train:0, {facts['seq']}"
        assert task["result"] in {None, ""}
        assert task["exception"] in {None, "user: invalid_input"}


def test_flower_wants_the_password(flower: httpx.Client) -> None:
    for path in ("/", "/tasks", "/workers", "/api/tasks", "/api/workers"):
        assert httpx.get(flower.base_url.join(path)).status_code == 401, path


def test_the_mesh_worker_is_online(flower: httpx.Client) -> None:
    workers = flower.get("/api/workers", params={"status": "true"}).json()

    assert any(name.startswith("default@") and online for name, online in workers.items())
