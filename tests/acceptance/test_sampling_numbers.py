"""What a sampler says of the tokens it drew is what the trainer computes for them, at every temperature."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
import torch
from transformers import AutoTokenizer

from harness.models import EXAMPLES
from harness.served import Served

# Both are float32; the sampler works with a cache and the trainer without one.
TOLERANCE = 1e-4
# More than two of the pieces in which the sampler computes a prompt.
LONG_TEXT_TOKENS = 700


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


def check_samples(
    run: tinker.TrainingClient, sampler: tinker.SamplingClient, prompt: list[int], temperature: float
) -> None:
    """Holds what is said of samples against the trainer's distribution at every one of their positions."""
    asked = tinker.SamplingParams(max_tokens=12, temperature=temperature, seed=7, stop=[])
    sequences = sampler.sample(tinker.ModelInput.from_ints(prompt), 3, asked).result().sequences

    for sequence in sequences:
        scores = all_logprobs(run, [*prompt, *sequence.tokens][:-1], vocab_size=len(run.get_tokenizer()))
        scaled = (scores / temperature).log_softmax(-1)[len(prompt) - 1 :]
        wanted = scaled[torch.arange(len(sequence.tokens)), torch.tensor(sequence.tokens)]

        assert len(sequence.tokens) == 12
        assert sequence.logprobs == pytest.approx(wanted.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 1.6])
def test_sampled_logprobs_are_the_trainers_scaled_by_the_temperature(
    run: tinker.TrainingClient, prompt: list[int], temperature: float
) -> None:
    check_samples(run, run.save_weights_and_get_sampling_client().result(), prompt, temperature)


@pytest.mark.parametrize("temperature", [0.5, 1.8])
def test_the_base_model_is_sampled_as_a_run_that_has_not_learned(
    served: Served, prompt: list[int], temperature: float
) -> None:
    client = served.client("base-numbers")
    untrained = client.create_lora_training_client(base_model="tiny", rank=8).result()

    check_samples(untrained, client.create_sampling_client(base_model="tiny"), prompt, temperature)


def test_a_long_text_scores_the_same_in_the_sampler_and_in_the_trainer(
    run: tinker.TrainingClient, tiny_model: Path
) -> None:
    text = (EXAMPLES / "self_cognition.jsonl").read_text()
    tokens = AutoTokenizer.from_pretrained(tiny_model).encode(text)[:LONG_TEXT_TOKENS]
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    sampler = run.save_weights_and_get_sampling_client().result()

    scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()

    (output,) = run.forward([datum], "cross_entropy").result().loss_fn_outputs
    assert len(scores) == LONG_TEXT_TOKENS
    assert scores[0] is None
    assert scores[1:] == pytest.approx(output["logprobs"].data, abs=TOLERANCE)


def test_prompt_logprobs_do_not_know_the_temperature(run: tinker.TrainingClient, prompt: list[int]) -> None:
    sampler = run.save_weights_and_get_sampling_client().result()
    asked = tinker.SamplingParams(max_tokens=1, temperature=0.25, seed=7)

    answer = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, asked, include_prompt_logprobs=True).result()

    scores = all_logprobs(run, prompt[:-1], vocab_size=len(run.get_tokenizer()))
    wanted = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    assert answer.prompt_logprobs[1:] == pytest.approx(wanted.tolist(), abs=TOLERANCE)


def test_every_score_of_a_prompt_and_a_sample_is_the_trainers(run: tinker.TrainingClient, prompt: list[int]) -> None:
    sampler = run.save_weights_and_get_sampling_client().result()
    asked = tinker.SamplingParams(max_tokens=2, temperature=0.5, seed=7, stop=[])
    # Of eight candidates at each position only two are wanted, so that the SDK sends the second request as CSR.
    candidates = torch.full((len(prompt) - 1, 8), -1)
    candidates[:, 2] = torch.tensor(prompt[1:])
    candidates[::2, 5] = 0

    def scored(targets: tinker.TensorData) -> tinker.SampleResponse:
        answer = sampler.sample(
            tinker.ModelInput.from_ints(prompt),
            1,
            asked,
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=3,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=2,
            target_prompt_logprobs=targets,
            prompt_alt_tokens_k=4,
        )
        return answer.result()

    dense = scored(tinker.TensorData.from_torch(candidates))
    sparse = scored(tinker.TensorData.from_torch_sparse(candidates, pad_value=-1))

    tokens = [*prompt, *dense.sequences[0].tokens]
    scores = all_logprobs(run, tokens[:-1], vocab_size=len(run.get_tokenizer()))
    of_prompt, of_sample = scores[: len(prompt) - 1], scores[len(prompt) - 1 :]
    wanted = of_prompt.gather(1, candidates.clamp(min=0)).where(candidates >= 0, 0.0)
    assert sparse.target_prompt_logprobs.sparse_crow_indices is not None
    assert dense.target_prompt_logprobs.sparse_crow_indices is None
    for answer in (dense, sparse):
        assert torch.allclose(answer.target_prompt_logprobs.to_torch(), wanted, atol=TOLERANCE)
    assert [value is None for value in dense.prompt_logprobs] == [True] * (len(prompt) - 3) + [False] * 3
    actual = of_prompt[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    assert dense.prompt_logprobs[-3:] == pytest.approx(actual[-3:].tolist(), abs=TOLERANCE)
    assert dense.topk_prompt_logprobs[:-3] == [None] * (len(prompt) - 3)
    assert_likeliest(dense.topk_prompt_logprobs[-3:], of_prompt[-3:])
    assert_likeliest(dense.sequences[0].topk_logprobs, (of_sample / 0.5).log_softmax(-1))
    drawn, said = (getattr(dense.prompt_alt_tokens, name).to_torch() for name in ("tokens", "logprobs"))
    assert drawn.shape == (len(prompt) - 1, 4)
    assert torch.allclose(said, (of_prompt / 0.5).log_softmax(-1).gather(1, drawn.long()), atol=TOLERANCE)


def assert_likeliest(rows: list[list[tuple[int, float]] | None], scores: torch.Tensor) -> None:
    """Each row holds the two likeliest tokens of its position, with their logprobs."""
    wanted = scores.topk(2)
    assert [[token for token, _ in row or []] for row in rows] == wanted.indices.tolist()
    said = [logprob for row in rows for _, logprob in row or []]
    assert said == pytest.approx(wanted.values.flatten().tolist(), abs=TOLERANCE)
