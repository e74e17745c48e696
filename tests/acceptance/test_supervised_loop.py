"""The supervised loop and its sampling through the official SDK, on a real model; what is saved is readable by PEFT."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.served import Served

LEARNING = tinker.AdamParams(learning_rate=5e-3)


def datum_of(tokens: list[int]) -> tinker.Datum:
    weights = [0.0] + [1.0] * (len(tokens) - 2)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


@pytest.fixture(scope="module")
def client(served: Served) -> tinker.ServiceClient:
    return served.client("loop")


@pytest.fixture(scope="module")
def batch(tiny_model: Path) -> list[tinker.Datum]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    texts = ["two and three make five", "the adapter learns, the base model stays", "ask again", "nine minus four"]
    return [datum_of(tokenizer.encode(text)) for text in texts]


def steps(run: tinker.TrainingClient, batch: list[tinker.Datum], count: int) -> list[float]:
    losses = []
    for _ in range(count):
        passed = run.forward_backward(batch, "cross_entropy")
        stepped = run.optim_step(LEARNING)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def logprobs(run: tinker.TrainingClient, batch: list[tinker.Datum]) -> list[list[float]]:
    return [output["logprobs"].tolist() for output in run.forward(batch, "cross_entropy").result().loss_fn_outputs]


@pytest.fixture(scope="module")
def trained(client: tinker.ServiceClient, batch: list[tinker.Datum]) -> tuple[tinker.TrainingClient, list[float]]:
    run = client.create_lora_training_client(base_model="tiny", rank=8, seed=5).result()
    return run, steps(run, batch, 12)


def test_the_loss_falls(trained: tuple[tinker.TrainingClient, list[float]]) -> None:
    losses = trained[1]

    assert losses[-1] < 0.8 * losses[0]


def test_the_tokenizer_is_found_by_the_sdk(trained: tuple, tiny_model: Path) -> None:
    tokenizer = trained[0].get_tokenizer()

    assert tokenizer.encode("two and three") == AutoTokenizer.from_pretrained(tiny_model).encode("two and three")


def test_the_loss_of_each_target_stands_beside_its_logprob_and_they_add_up(
    trained: tuple[tinker.TrainingClient, list[float]], batch: list[tinker.Datum]
) -> None:
    result = trained[0].forward(batch, "cross_entropy").result()

    terms = [output["elementwise_loss"].tolist() for output in result.loss_fn_outputs]
    assert [len(row) for row in terms] == [datum.model_input.length for datum in batch]
    assert sum(map(sum, terms)) == pytest.approx(result.metrics["loss:sum"], rel=1e-5)


def test_gradients_accumulate_over_calls_by_summation(client: tinker.ServiceClient, batch: list[tinker.Datum]) -> None:
    whole = client.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
    parts = client.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()

    whole.forward_backward(batch[:2], "cross_entropy").result()
    parts.forward_backward(batch[:1], "cross_entropy").result()
    parts.forward_backward(batch[1:2], "cross_entropy").result()
    norms = [run.optim_step(LEARNING).result().metrics["grad_norm"] for run in (whole, parts)]

    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    # Two calls add up in another order than one: equal to rounding, not to the bit.
    assert logprobs(whole, batch)[0] == pytest.approx(logprobs(parts, batch)[0], abs=1e-5)


def test_importance_sampling_follows_its_formula(
    trained: tuple[tinker.TrainingClient, list[float]], batch: list[tinker.Datum]
) -> None:
    run = trained[0]
    now = logprobs(run, batch)[0]
    old = [value - 0.1 for value in now]
    advantages = [0.75 - index % 2 for index in range(len(now))]
    targets = batch[0].loss_fn_inputs["target_tokens"].tolist()
    datum = tinker.Datum(
        model_input=batch[0].model_input,
        loss_fn_inputs={"target_tokens": targets, "logprobs": old, "advantages": advantages},
    )

    answer = run.forward([datum], "importance_sampling").result()

    wanted = -sum(math.exp(0.1) * advantage for advantage in advantages)
    assert answer.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4)


def test_a_run_resumed_with_the_optimizer_equals_the_uninterrupted_one_and_without_it_does_not(
    client: tinker.ServiceClient, batch: list[tinker.Datum]
) -> None:
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=6).result()
    steps(run, batch, 5)
    path = run.save_state("halfway").result().path
    uninterrupted = steps(run, batch, 5)

    warm = client.create_training_client_from_state_with_optimizer(path).result()
    cold = client.create_training_client_from_state(path).result()

    assert steps(warm, batch, 5) == uninterrupted
    colder = steps(cold, batch, 5)
    assert colder[0] == uninterrupted[0]
    assert colder[1:] != uninterrupted[1:]


def test_a_loss_of_the_clients_own_trains_by_its_own_gradient(
    client: tinker.ServiceClient, batch: list[tinker.Datum]
) -> None:
    by_name, by_hand = (client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result() for _ in "ab")

    def likelihood(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return -sum((lp * w).sum() for lp, w in zip(logprobs, weights, strict=True)), {"datums:sum": float(len(data))}

    theirs = by_name.forward_backward(batch, "cross_entropy").result().metrics
    ours = by_hand.forward_backward_custom(batch, likelihood).result().metrics
    norms = [run.optim_step(LEARNING).result().metrics["grad_norm"] for run in (by_name, by_hand)]

    assert ours["loss:sum"] == pytest.approx(theirs["loss:sum"], rel=1e-6)
    assert ours["datums:sum"] == len(batch)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert logprobs(by_hand, batch)[0] == pytest.approx(logprobs(by_name, batch)[0], abs=1e-5)


def test_a_loss_of_the_clients_own_that_fails_harms_only_its_run(
    client: tinker.ServiceClient, batch: list[tinker.Datum]
) -> None:
    run, other = (client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result() for _ in "ab")

    def broken(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run.forward_backward_custom(batch, broken).result()

    assert len(steps(other, batch, 2)) == 2


def test_what_a_loss_has_no_use_for_is_passed_over(client: tinker.ServiceClient, batch: list[tinker.Datum]) -> None:
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    targets = batch[0].loss_fn_inputs["target_tokens"].tolist()
    mask = tinker.TensorData(data=[1.0] * len(targets), dtype="float32", shape=[len(targets)])
    more = tinker.Datum(model_input=batch[0].model_input, loss_fn_inputs={**batch[0].loss_fn_inputs, "mask": mask})

    losses = [run.forward([datum], "cross_entropy").result().metrics["loss:sum"] for datum in (batch[0], more)]

    assert losses[0] == losses[1]


def test_loading_into_a_live_run_takes_it_back(client: tinker.ServiceClient, batch: list[tinker.Datum]) -> None:
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=6).result()
    steps(run, batch, 3)
    path = run.save_state("three").result().path
    onward = steps(run, batch, 3)

    run.load_state_with_optimizer(path).result()

    assert steps(run, batch, 3) == onward


def test_sampler_and_trainer_agree_on_logprobs_and_sampling_leaves_the_run_alone(
    trained: tuple[tinker.TrainingClient, list[float]], batch: list[tinker.Datum]
) -> None:
    run = trained[0]
    before = logprobs(run, batch)
    sampler = run.save_weights_and_get_sampling_client()
    tokens = [*batch[0].model_input.to_ints(), batch[0].loss_fn_inputs["target_tokens"].tolist()[-1]]

    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()

    assert scored[0] is None
    assert scored[1:] == pytest.approx(before[0], abs=1e-5)
    assert logprobs(run, batch) == before


def test_a_seeded_sample_repeats_and_a_greedy_one_is_the_likeliest(
    trained: tuple[tinker.TrainingClient, list[float]], batch: list[tinker.Datum]
) -> None:
    sampler = trained[0].save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints(batch[1].model_input.to_ints()[:5])
    seeded = tinker.SamplingParams(max_tokens=12, seed=3, temperature=1.0)
    greedy = tinker.SamplingParams(max_tokens=1, temperature=0.0)

    first, second = (sampler.sample(prompt, num_samples=3, sampling_params=seeded).result() for _ in range(2))
    best = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences[0]

    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) > 1
    assert all(len(s.logprobs) == len(s.tokens) for s in first.sequences)
    assert len(best.tokens) == 1


def test_a_named_sampler_checkpoint_and_the_base_model_sample_differently(
    client: tinker.ServiceClient, trained: tuple[tinker.TrainingClient, list[float]], batch: list[tinker.Datum]
) -> None:
    path = trained[0].save_weights_for_sampler("named").result().path
    named = client.create_sampling_client(model_path=path).result()
    base = client.create_sampling_client(base_model="tiny").result()
    prompt = batch[0].model_input

    taught, untaught = (one.compute_logprobs(prompt).result() for one in (named, base))

    assert sum(taught[2:]) > sum(untaught[2:])


def test_the_checkpoint_is_listed_and_plain_peft_computes_the_same_logprobs(
    served: Served,
    client: tinker.ServiceClient,
    trained: tuple[tinker.TrainingClient, list[float]],
    batch: list[tinker.Datum],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    run = trained[0]
    path = run.save_state("for-peft").result().path
    listed = client.create_rest_client().list_checkpoints(run.model_id).result().checkpoints
    assert path in {checkpoint.tinker_path for checkpoint in listed}
    (files,) = served.query("SELECT files FROM checkpoint WHERE path = ?", path)[0]
    for name, file in json.loads(files).items():
        (tmp_path / name).write_bytes((served.home / "objects" / file["key"]).read_bytes())

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path).eval()
    tokens = torch.tensor([batch[0].model_input.to_ints()])
    targets = torch.tensor(batch[0].loss_fn_inputs["target_tokens"].tolist())
    with torch.no_grad():
        scores = model(tokens).logits[0].log_softmax(-1)
    wanted = scores[torch.arange(len(targets)), targets].tolist()

    assert logprobs(run, batch)[0] == pytest.approx(wanted, abs=1e-5)
