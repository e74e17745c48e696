"""A run on a model whose layers carry a state: killed in the middle, it ends and samples as if nothing had been."""

from __future__ import annotations

from functools import partial

import pytest
import tinker

from harness.crashes import Crashes
from harness.killed_runs import stored_hashes, train
from harness.models import make_text_model
from harness.served import Served
from twinkle.hub.tiny import Family

NUM_STEPS = 6
KILL_AFTER = {1: "worker.executed", 3: "worker.committed"}
LENGTHS = (100, 3)
"""Longer than a chunk of the recurrence, and shorter than the convolution."""
PROMPT = tinker.ModelInput.from_ints([11 + step % 40 for step in range(70)])
PARAMS = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=5)


def data(step: int) -> list[tinker.Datum]:
    rows = [[(7 * step + 3 * position) % 50 + 10 for position in range(length + 1)] for length in LENGTHS]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in rows
    ]


def train_and_sample(served: Served, tenant: str, kills: dict[int, partial[None]]) -> tuple[object, ...]:
    """Pipelined steps; the losses, where the state was saved, and what two samples of the end are."""
    client = served.client(tenant).create_lora_training_client(base_model="hybrid", rank=4, seed=7).result()
    losses, path = train(
        client, lambda step: client.forward_backward(data(step), "cross_entropy"), num_steps=NUM_STEPS, kills=kills
    )
    drawn = client.save_weights_and_get_sampling_client().sample(PROMPT, 2, PARAMS).result().sequences
    return losses, path, [(list(sequence.tokens), list(sequence.logprobs)) for sequence in drawn]


# What a kill undoes is an adapter's, whatever the layers: of every day is the one of test_worker_killed.py.
@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_killed_run_on_a_hybrid_ends_with_the_same_bits_and_samples_the_same_tokens(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hybrid")
    model = make_text_model(folder / "model", family)
    crashes = Crashes(folder / "crashes")
    with Served(folder / "home", model=str(model), model_name="hybrid", **crashes.variables) as served:
        losses, path, drawn = train_and_sample(served, "calm", {})
        kills = {step: partial(crashes.arm, point) for step, point in KILL_AFTER.items()}
        struck_losses, struck_path, struck_drawn = train_and_sample(served, "struck", kills)
        hashes = [stored_hashes(served, at) for at in (path, struck_path)]

    assert all(crashes.has_fired(point) for point in KILL_AFTER.values())
    assert struck_losses == losses
    assert struck_drawn == drawn
    assert hashes[0] == hashes[1]
