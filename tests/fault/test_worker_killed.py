"""SIGKILL of the process that owns the device, in the middle of a run on a real model, at two narrow moments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import tinker

from harness.served import Served
from harness.struck import Struck

NUM_STEPS = 20
KILL_AFTER = {4: "worker.executed", 11: "worker.committed"}


def datum(step: int) -> tinker.Datum:
    tokens = [(7 * step + 3 * position) % 50 + 10 for position in range(24)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def train(served: Served, tenant: str, kill_after: Mapping[int, Callable[[], None]]) -> tuple[str, list[float], str]:
    """Twenty pipelined steps; the losses, the steps the optimizer counted, and where the state was saved."""
    client = served.client(tenant).create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    pending = []
    for step in range(NUM_STEPS):
        passed = client.forward_backward([datum(step)], "cross_entropy")
        stepped = client.optim_step(tinker.AdamParams(learning_rate=1e-2))
        pending.append((passed, stepped))
        if step in kill_after:
            passed.result()
            kill_after[step]()
    losses = [passed.result().metrics["loss:sum"] for passed, _ in pending]
    counted = [stepped.result().metrics["step"] for _, stepped in pending]
    assert counted == [float(step) for step in range(1, NUM_STEPS + 1)]
    return client.save_state("end").result().path, losses, client.model_id


@pytest.fixture(scope="module")
def disturbed_and_not(struck_model: Struck) -> dict[str, object]:
    served = struck_model.served
    undisturbed = train(served, "calm", {})
    epoch = served.query("SELECT epoch FROM mesh")[0][0]
    kills = {step: partial(struck_model.crashes.arm, point) for step, point in KILL_AFTER.items()}
    disturbed = train(served, "disturbed", kills)
    files = {path: files for path, files in served.query("SELECT path, files FROM checkpoint WHERE kind = 'training'")}
    operations = served.query(
        "SELECT seq, kind, state, attempts FROM operation WHERE lane = ? ORDER BY seq", disturbed[2]
    )
    new_epochs = served.query("SELECT epoch FROM mesh")[0][0] - epoch
    return {
        "undisturbed": undisturbed,
        "disturbed": disturbed,
        "files": files,
        "operations": operations,
        "new_epochs": new_epochs,
    }


def sha256s(files: str) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in json.loads(files).items()}


def test_the_run_ends_by_itself_with_the_same_weights_and_moments(disturbed_and_not: dict) -> None:
    files = disturbed_and_not["files"]
    calm = sha256s(files[disturbed_and_not["undisturbed"][0]])
    struck = sha256s(files[disturbed_and_not["disturbed"][0]])

    assert set(calm) == {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"}
    assert struck == calm


def test_every_loss_is_the_same_to_the_bit(disturbed_and_not: dict) -> None:
    assert disturbed_and_not["disturbed"][1] == disturbed_and_not["undisturbed"][1]


def test_the_journal_holds_each_operation_once_done_and_in_order(disturbed_and_not: dict) -> None:
    operations = disturbed_and_not["operations"]

    assert [seq for seq, _, _, _ in operations] == list(range(2 * NUM_STEPS + 2))
    assert {state for _, _, state, _ in operations} == {"done"}


def test_the_worker_really_died_each_time(disturbed_and_not: dict) -> None:
    assert disturbed_and_not["new_epochs"] == len(KILL_AFTER)
