"""What a sampler says of the tokens it drew is what the trainer computes for them, at every temperature."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
import torch
from transformers import AutoTokenizer

from harness.served import Served

# Both are float32; the sampler works with a cache and the trainer without one.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def run(served: Served, tiny_model: Path) -> tinker.TrainingClient:
    """A run a few steps from the base model, so that its adapter counts."""
    run = served.client("numbers").create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
    tokens = AutoTokenizer.from_pretrained(tiny_model).encode("two and three make five, nine minus four makes five")
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for _ in range(6):
        run.forward_backward([datum], "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    return run


@pytest.fixture(scope="module")
def prompt(tiny_model: Path) -> list[int]:
    return AutoTokenizer.from_pretrained(tiny_model).encode("How much is 9 minus 4?")


def all_logprobs(run: tinker.TrainingClient, tokens: list[int], vocab_size: int) -> torch.Tensor:
    """Returns the trainer's logprobs of every vocabulary entry after each token, as `cross_entropy` with soft targets
    gives them: (len(tokens), vocab_size)."""
    shape = (len(tokens), vocab_size)
    targets = torch.arange(vocab_size).expand(shape).contiguous()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_torch(targets),
            "weights": tinker.TensorData.from_torch(torch.zeros(shape)),
        },
    )
    (output,) = run.forward([datum], "cross_entropy").result().loss_fn_outputs
    return output["logprobs"].to_torch().reshape(shape)


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 1.6])
def test_sampled_logprobs_are_the_trainers_scaled_by_the_temperature(
    run: tinker.TrainingClient, prompt: list[int], temperature: float
) -> None:
    sampler = run.save_weights_and_get_sampling_client().result()
    asked = tinker.SamplingParams(max_tokens=12, temperature=temperature, seed=7, stop=[])
    sequences = sampler.sample(tinker.ModelInput.from_ints(prompt), 3, asked).result().sequences

    for sequence in sequences:
        scores = all_logprobs(run, [*prompt, *sequence.tokens][:-1], vocab_size=len(run.get_tokenizer()))
        scaled = (scores / temperature).log_softmax(-1)[len(prompt) - 1 :]
        wanted = scaled[torch.arange(len(sequence.tokens)), torch.tensor(sequence.tokens)]

        assert len(sequence.tokens) == 12
        assert sequence.logprobs == pytest.approx(wanted.tolist(), abs=TOLERANCE)


def test_prompt_logprobs_do_not_know_the_temperature(run: tinker.TrainingClient, prompt: list[int]) -> None:
    sampler = run.save_weights_and_get_sampling_client().result()
    asked = tinker.SamplingParams(max_tokens=1, temperature=0.25, seed=7)

    answer = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, asked, include_prompt_logprobs=True).result()

    scores = all_logprobs(run, prompt[:-1], vocab_size=len(run.get_tokenizer()))
    wanted = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    assert answer.prompt_logprobs[1:] == pytest.approx(wanted.tolist(), abs=TOLERANCE)
