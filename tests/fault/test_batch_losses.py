"""Losses that compare datums are operations like any other: refused by name in their turn, replayed to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tinker

from harness.crashes import Crashes
from harness.killed_runs import stored_hashes, train
from harness.models import make_text_model
from harness.served import Served

NUM_STEPS = 4
KILL_AFTER = {2: "worker.executed"}


def pairs(step: int, **inputs: float) -> list[tinker.Datum]:
    """Two pairs of rows of different lengths, each with the given value for every token."""
    rows = [[(7 * step + 3 * position + 11 * row) % 50 + 10 for position in range(8 + 3 * row)] for row in range(4)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": [0.0, 0.0, *[1.0] * (len(tokens) - 3)],
                **{name: np.full(len(tokens) - 1, value, np.float32) for name, value in inputs.items()},
            },
        )
        for tokens in rows
    ]


def train_both_ways(served: Served, tenant: str, kills: dict[int, partial[None]]) -> tuple[list[float], str]:
    """Steps of two losses in turn; the losses, and where the state was saved."""
    client = served.client(tenant).create_lora_training_client(base_model="text", rank=4, seed=7).result()

    def send_pass(step: int) -> Any:
        if step % 2:
            return client.forward_backward(pairs(0, ref_logps=-4.0), "DPOLoss", {"beta": 0.5})
        return client.forward_backward(pairs(0, advantages=1.0 - step, old_logps=-4.0), "GRPOLoss")

    return train(client, send_pass, num_steps=NUM_STEPS, kills=kills)


def wrong_batches_are_refused(served: Served) -> None:
    """In their turn, by the API alone, and the next operation runs."""
    client = served.client("wrong").create_lora_training_client(base_model="text", rank=4).result()
    odd = client.forward_backward(pairs(0, ref_logps=-4.0)[:3], "DPOLoss")
    unknown = client.forward_backward(pairs(0, ref_logps=-4.0), "DPOLoss", {"betta": 0.1})
    fine = client.forward_backward(pairs(0, ref_logps=-4.0), "DPOLoss", {"beta": 0.1})
    with pytest.raises(tinker.TinkerError, match="has 3 datums; DPOLoss takes pairs"):
        odd.result()
    with pytest.raises(tinker.TinkerError, match="did you mean beta"):
        unknown.result()
    assert len(fine.result().loss_fn_outputs) == 4


# Fine-tunings on preferences and by GRPO whose parts are killed are of every day (test_fine_tuning_killed.py).
@pytest.mark.soak
def test_preferences_and_groups_end_in_the_same_bits_when_the_worker_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("batch-losses")
    model = make_text_model(folder / "model")
    crashes = Crashes(folder / "crashes")
    with Served(folder / "home", model=str(model), model_name="text", **crashes.variables) as served:
        wrong_batches_are_refused(served)
        losses, path = train_both_ways(served, "calm", {})
        kills = {step: partial(crashes.arm, point) for step, point in KILL_AFTER.items()}
        struck_losses, struck_path = train_both_ways(served, "struck", kills)
        hashes = [stored_hashes(served, at) for at in (path, struck_path)]

    assert all(crashes.has_fired(point) for point in KILL_AFTER.values())
    assert struck_losses == losses
    # The margin of the same pairs grows.
    assert losses[3] < losses[1]
    assert hashes[0] == hashes[1]
