"""A run on pictures with a model whose layers carry a state: killed in the middle, it ends as if nothing had been."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tinker

from harness.crashes import Crashes
from harness.killed_runs import stored_hashes, train
from harness.picture_files import picture_file
from harness.pictures import VISION_END, VISION_START, num_tokens, save_picture_model
from harness.served import Served

NUM_STEPS = 4
KILL_AFTER = {1: "worker.executed"}
SIZES = ((24, 16), (64, 64))
"""The second is more than fits the journal: its operations' payloads lie in the object store."""
PARAMS = tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=5)


def prompt_of(step: int, width: int, height: int) -> tinker.ModelInput:
    picture = picture_file(step, width=width, height=height)
    return tinker.ModelInput(
        chunks=[
            tinker.EncodedTextChunk(tokens=[5, 6 + step, VISION_START]),
            tinker.types.ImageChunk(data=picture, format="png", expected_tokens=num_tokens(width, height)),
            tinker.EncodedTextChunk(tokens=[VISION_END, *range(10, 20 + step)]),
        ]
    )


def data(step: int) -> list[tinker.Datum]:
    made = []
    for width, height in SIZES:
        prompt = prompt_of(step, width, height)
        inputs = {"target_tokens": [7 + step] * prompt.length, "weights": np.ones(prompt.length, np.float32)}
        made.append(tinker.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return made


def train_and_sample(served: Served, tenant: str, kills: dict[int, partial[None]]) -> tuple[object, ...]:
    """Pipelined steps; the losses, where the state was saved, and a sample of the end."""
    client = served.client(tenant).create_lora_training_client(base_model="pictures", rank=4, seed=7).result()
    losses, path = train(
        client, lambda step: client.forward_backward(data(step), "cross_entropy"), num_steps=NUM_STEPS, kills=kills
    )
    sampler = client.save_weights_and_get_sampling_client()
    drawn = sampler.sample(prompt_of(1, *SIZES[1]), 2, PARAMS).result().sequences
    return losses, path, [(list(sequence.tokens), list(sequence.logprobs)) for sequence in drawn]


@pytest.mark.soak
def test_a_killed_run_on_pictures_ends_with_the_same_bits_and_samples_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("pictures")
    model = save_picture_model(folder / "model", "qwen3.5")
    crashes = Crashes(folder / "crashes")
    with Served(folder / "home", model=str(model), model_name="pictures", **crashes.variables) as served:
        losses, path, drawn = train_and_sample(served, "calm", {})
        kills = {step: partial(crashes.arm, point) for step, point in KILL_AFTER.items()}
        struck_losses, struck_path, struck_drawn = train_and_sample(served, "struck", kills)
        hashes = [stored_hashes(served, at) for at in (path, struck_path)]

    assert all(crashes.has_fired(point) for point in KILL_AFTER.values())
    assert struck_losses == losses
    assert struck_drawn == drawn
    assert hashes[0] == hashes[1]
