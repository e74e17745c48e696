"""Our client of the Twinkle dialect against a whole service: every call, in its order, exactly once, whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness.served import Served
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import InvalidInput, NotFound, UserError
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

MODEL = "null"
TIMEOUT_S = 120.0
ROWS = [{"input_ids": list(range(8)), "labels": list(range(1, 9))}]

SUBMIT_AND_DIE = """
import os, signal
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel

init_twinkle_client()
model = MultiLoraTransformersModel("null")
model.add_adapter_to_model("a", {"r": 4})
futures = []
for _ in range(10):
    futures.append(model.submit.forward_backward(inputs=[{"input_ids": [1, 2], "labels": [2, 3]}]))
    futures.append(model.submit.clip_grad_and_step())
futures.append(model.submit.save("end", save_optimizer=True))
print(futures[-1].accepted(60), futures[0].request_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose engine computes nothing but counts everything."""
    with Served(tmp_path_factory.mktemp("twinkle") / "home", model=MODEL, flags=("--engine", "null")) as it:
        yield it


@pytest.fixture
def key(served: Served) -> str:
    """The key of a tenant of its own."""
    return served.create_key(f"tenant-{time.monotonic_ns()}")


@pytest.fixture
def client(served: Served, key: str) -> Iterator[TwinkleClient]:
    """A client of the new tenant."""
    with TwinkleClient(served.url, key) as it:
        yield it


def new_model(client: TwinkleClient, name: str = "default") -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel("ms://null", connection=client.connection)
    model.add_adapter_to_model(name, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    return model


def num_operations(served: Served) -> int:
    return int(served.query("SELECT count(*) FROM operation")[0][0])


def test_every_call_of_a_model_is_answered(client: TwinkleClient) -> None:
    model = new_model(client)
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_optimizer("AdamW", lr=1e-4)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=10)
    model.set_template("Template")
    model.set_processor("InputProcessor")
    model.add_metric("LossMetric", is_training=True)
    assert model.forward_only(inputs=ROWS, disable_lora=True).result is not None
    output = model.forward_backward(inputs=ROWS)
    assert isinstance(output["loss"], float)
    assert [model.clip_grad_and_step(), model.zero_grad(), model.lr_step(), model.step()] == [None] * 4
    assert "loss" in dict(model.calculate_metric()) and "loss" in model.calculate_metric().result
    assert isinstance(model.get_train_configs(), str)
    saved = model.save("step-1", save_optimizer=True, consumed_train_samples=8)
    assert saved.startswith("twinkle://") and saved.endswith("/weights/step-1")
    model.load(saved, load_optimizer=True)
    assert model.resume_from_checkpoint(saved).consumed_train_samples == 8
    assert model.save("s", is_sampler=True).partition("/sampler_weights/")[1]


def test_what_was_trained_is_listed_and_deleted(client: TwinkleClient) -> None:
    model = new_model(client)
    saved = model.save("step-1")

    (run,) = client.list_training_runs()
    (checkpoint,) = client.list_checkpoints(run.training_run_id)
    assert (run.base_model, run.lora_rank) == (MODEL, 4)
    assert checkpoint.twinkle_path == saved == client.get_checkpoint_twinkle_path(run.training_run_id, "weights/step-1")
    assert client.get_weights_info(saved).lora_rank == 4
    assert client.delete_checkpoint(run.training_run_id, checkpoint.checkpoint_id).success
    with pytest.raises(NotFound):
        client.get_weights_info(saved)


def test_calls_that_are_not_waited_for_are_done_in_their_order(client: TwinkleClient) -> None:
    waited, unwaited = (new_model(client, name) for name in ("waited", "unwaited"))
    unwaited.load(waited.save("start", save_optimizer=True), load_optimizer=True)
    for _ in range(20):
        waited.forward_backward(inputs=ROWS)
        waited.clip_grad_and_step()
    for _ in range(20):
        unwaited.submit.forward_backward(inputs=ROWS)
        unwaited.submit.clip_grad_and_step()

    assert unwaited.calculate_metric() == waited.calculate_metric()


def test_what_a_killed_process_submitted_is_collected_by_another(
    served: Served, key: str, client: TwinkleClient
) -> None:
    environment = {**os.environ, "TWINKLE_SERVER_URL": served.url, "TWINKLE_SERVER_TOKEN": key}
    killed = subprocess.run(
        [sys.executable, "-c", SUBMIT_AND_DIE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last, first = killed.stdout.split()

    assert client.future(last).result(TIMEOUT_S).endswith("/weights/end")
    assert isinstance(client.future(first).result(TIMEOUT_S).loss, float)


def test_calls_outlive_a_killed_api_and_a_killed_worker_and_none_is_done_twice(
    served: Served, client: TwinkleClient
) -> None:
    model = new_model(client)
    model.set_optimizer("AdamW", lr=1e-4)
    before = num_operations(served)
    for number in range(60):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()
        if number == 10:
            served.part("the API").kill()
        if number == 30:
            served.kill_engine()
    assert num_operations(served) == before + 120


def test_what_was_saved_is_sampled_in_both_forms_and_as_it_grows(client: TwinkleClient) -> None:
    saved = new_model(client).save("sampled", is_sampler=True)
    sampler = vLLMSampler("ms://null", connection=client.connection)

    new = sampler.sample([{"input_ids": [1, 2]}] * 2, {"max_tokens": 3, "logprobs": 1}, adapter_uri=saved)
    old = sampler.sample(inputs=[{"input_ids": [1, 2]}], sampling_params={"max_tokens": 3}, num_samples=4)
    later = [sampler.submit.sample([1, 2, 3], {"max_tokens": 2}) for _ in range(8)]

    assert [len(response.sequences[0].logprobs[0][0]) for response in new] == [2, 2]
    assert [len(sequence.get("logprobs", [])) for sequence in old.get("sequences", [])] == [3] * 4
    assert all(isinstance(logprob, float) for sequence in old["sequences"] for logprob in sequence.logprobs)
    assert {len(future.result(TIMEOUT_S)[0].sequences[0].tokens) for future in later} == {2}
    with pytest.raises(UserError, match="patch"):
        sampler.apply_patch("NoopPatch")
    with pytest.raises(UserError, match="tokenizer"):
        list(sampler.sample_stream({"input_ids": [1, 2]}, {"max_tokens": 2}))


def test_a_refusal_is_in_the_servers_words(client: TwinkleClient) -> None:
    with pytest.raises(NotFound, match="null"):
        MultiLoraTransformersModel("no-such-model", connection=client.connection)
    model = new_model(client)
    with pytest.raises(UserError) as caught:
        model.load("twinkle://nobody/weights/nothing")
    assert "Traceback" not in str(caught.value)
    with pytest.raises(InvalidInput):
        model.add_adapter_to_model("../x", {"r": 4})
