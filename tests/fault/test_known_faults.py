"""What is known to break services of this kind, tried here on a real model; named after the fault."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
import tinker

from harness.calls import optim_step, passes, retrieve, send_passes
from harness.deployment import Deployment
from harness.polling import wait_until
from harness.served import Served
from harness.servers import free_port
from harness.struck import Struck

TOKENS = [11, 12, 13, 14, 15, 16]


@pytest.fixture(scope="module")
def served(struck_model: Struck) -> Served:
    return struck_model.served


@pytest.fixture(scope="module")
def client(served: Served) -> tinker.ServiceClient:
    return served.client("victim")


@pytest.fixture(scope="module")
def culprit(served: Served) -> tinker.ServiceClient:
    return served.client("culprit")


def datum(weight: float = 1.0) -> tinker.Datum:
    weights = [weight] * (len(TOKENS) - 1)
    inputs = {"target_tokens": TOKENS[1:], "weights": weights}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def new_run(client: tinker.ServiceClient, seed: int = 1) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result()


def step(run: tinker.TrainingClient, **params: float) -> None:
    passed = run.forward_backward([datum()], "cross_entropy")
    stepped = run.optim_step(tinker.AdamParams(**({"learning_rate": 1e-2} | params)))
    passed.result(), stepped.result()


def logprobs(run: tinker.TrainingClient) -> list[float]:
    answer = run.forward([datum()], "cross_entropy").result()
    return [float(value) for value in answer.loss_fn_outputs[0]["logprobs"].tolist()]


def test_weight_decay_of_one_tenant_does_not_reach_another(
    client: tinker.ServiceClient, culprit: tinker.ServiceClient
) -> None:
    victim, other = new_run(client), new_run(culprit)
    step(victim)
    before = logprobs(victim)

    for _ in range(2):
        step(other, learning_rate=0.1, weight_decay=0.9)

    assert logprobs(victim) == before


def test_nan_of_one_tenant_does_not_reach_another(client: tinker.ServiceClient, culprit: tinker.ServiceClient) -> None:
    victim, other = new_run(client), new_run(culprit)
    step(victim)
    before = logprobs(victim)

    poisoned = other.forward_backward([datum(float("nan"))], "cross_entropy")
    applied = other.optim_step(tinker.AdamParams(learning_rate=1e30))
    for future in (poisoned, applied):
        with pytest.raises(tinker.RequestFailedError):
            future.result()

    assert logprobs(victim) == before
    assert logprobs(new_run(client)) == logprobs(new_run(culprit))


def test_sampling_an_old_checkpoint_leaves_the_live_weights_alone(client: tinker.ServiceClient) -> None:
    run = new_run(client)
    step(run)
    old = run.save_weights_for_sampler("old").result().path
    step(run)
    before = logprobs(run)

    sampler = client.create_sampling_client(model_path=old).result()
    sampler.sample(tinker.ModelInput.from_ints(TOKENS), 1, tinker.SamplingParams(max_tokens=2)).result()
    untouched = logprobs(run)
    step(run)

    assert untouched == before


def test_a_failed_operation_does_not_block_its_run(client: tinker.ServiceClient) -> None:
    run = new_run(client)
    beyond = datum()
    beyond.loss_fn_inputs["target_tokens"] = tinker.TensorData(data=[10**6] * 5, dtype="int64", shape=[5])

    failed = run.forward_backward([beyond], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError):
        failed.result()
    with pytest.raises(tinker.RequestFailedError):
        run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()

    step(run)


def test_polling_someone_elses_pending_future_does_it_no_harm(served: Served) -> None:
    owner, stranger = (_http(served, name) for name in ("owner", "stranger"))
    model_id = _adapter(owner)
    ahead = owner.post("/optim_step", json=optim_step(model_id, 2)).json()["request_id"]

    refused = stranger.post("/retrieve_future", json={"request_id": ahead})
    send_passes(owner, passes(model_id, 1))
    answered = retrieve(owner, ahead)

    assert refused.status_code == 404
    assert "metrics" in answered.json()


def test_a_giant_rank_breaks_nobodys_create_model(client: tinker.ServiceClient, culprit: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="rank"):
        culprit.create_lora_training_client(base_model="tiny", rank=100_000_000).result()

    step(new_run(client))
    step(new_run(culprit))


def test_an_unknown_future_is_not_polled_for_ever(served: Served) -> None:
    owner = _http(served, "owner")
    started = time.monotonic()

    refused = owner.post("/retrieve_future", json={"request_id": "no:train:0:req:1"})

    assert refused.status_code == 404
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("data", [[], [tinker.Datum(model_input=tinker.ModelInput.from_ints([]), loss_fn_inputs={})]])
def test_an_empty_batch_ends(served: Served, client: tinker.ServiceClient, data: list[tinker.Datum]) -> None:
    run = new_run(client)

    if data:
        with pytest.raises(tinker.RequestFailedError):
            run.forward_backward(data, "cross_entropy").result()
    else:
        with pytest.raises((tinker.RequestFailedError, ValueError)):
            run.forward_backward(data, "cross_entropy").result()


def _http(served: Served, tenant: str) -> httpx.Client:
    key = served.create_key(tenant)
    return httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": key}, timeout=60, trust_env=False)


def _adapter(http: httpx.Client) -> str:
    session_id = http.post("/create_session", json={}).json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    ticket = http.post("/create_model", json=body).json()
    retrieve(http, ticket["request_id"])
    return str(ticket["model_id"])


def test_a_worker_that_waits_for_its_database_ends_when_it_is_told_to(tmp_path: Path) -> None:
    settings = {
        "TWINKLE_DATABASE_URL": f"postgresql://nobody@127.0.0.1:{free_port()}/nowhere",
        "TWINKLE_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
        "TWINKLE_HOME": str(tmp_path / "home"),
    }
    deployment = Deployment(tmp_path, settings)
    worker = deployment.start("worker", "worker", "--engine", "null", "--model", "null")
    try:
        wait_until(
            lambda: "worker.waits_for_database" in deployment.log("worker"),
            what="the worker meets no database",
            deadline_s=60,
        )
        worker.terminate()
        worker.wait(timeout=10)
    finally:
        worker.kill()
        worker.wait()
