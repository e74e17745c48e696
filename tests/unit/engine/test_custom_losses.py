"""A client's own loss in a fused step: the bits it has alone, the gradient of the surrogate, trouble of its own."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from harness import traced_losses
from harness.traced_losses import graph_of
from twinkle.core.errors import InvalidInput
from twinkle.loss import TracedLoss
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraConfig

CONFIG = LoraConfig(rank=4, seed=1)
POLICY = graph_of(traced_losses.clipped_policy, {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1})
PREFERENCE = graph_of(traced_losses.preference, {"logprobs": 2, "reference_logprobs": 2, "beta": 0})


def failing(logprobs, advantages):
    return (logprobs.log() * advantages).sum(), {}


FAILING = graph_of(failing, {"logprobs": 1, "advantages": 1})
# Float32 sums in another order: what a client rounds when it sends its gradient as weights.
TOLERANCE = 1e-5


def with_inputs(datum, **inputs):
    return Datum(datum.tokens, {**datum.inputs, **inputs})


def policy_datum(make_datum, rng, length):
    datum = make_datum(rng, length)
    return with_inputs(datum, old_logprobs=datum.inputs["logprobs"], mask=datum.inputs["sequence_ratio_mask"])


def preference_datum(make_datum, rng, length):
    datum = make_datum(rng, length, columns=2)
    return with_inputs(datum, reference_logprobs=datum.inputs["logprobs"], beta=np.array([0.3], dtype=np.float32))


@pytest.fixture
def new_adapter():
    def make(model, seed):
        adapter = model.create_adapter(CONFIG)
        draws = np.random.default_rng(seed).normal(0, 0.05, adapter.params.numel())
        adapter.params.copy_(torch.from_numpy(draws))
        return adapter

    return make


def jobs_of(model, make_datum, new_adapter):
    rng = np.random.default_rng(7)
    data = [
        (tuple(policy_datum(make_datum, rng, n) for n in (9, 17)), "custom", POLICY),
        (tuple(make_datum(rng, n) for n in (5, 20)), "ppo", None),
        (tuple(preference_datum(make_datum, rng, n) for n in (4, 11)), "custom", PREFERENCE),
        (tuple(make_datum(rng, n) for n in (8, 8)), "custom", FAILING),
        (tuple(make_datum(rng, n) for n in (30,)), "cross_entropy", None),
    ]
    return [
        TrainJob(new_adapter(model, seed), datums, loss, graph=graph) for seed, (datums, loss, graph) in enumerate(data)
    ]


def said(outcome, job):
    if isinstance(outcome, Exception):
        return str(outcome), job.adapter.grad.numpy().tobytes()
    return (
        outcome.loss,
        [logprobs.tobytes() for logprobs in outcome.logprobs],
        outcome.metrics,
        job.adapter.grad.numpy().tobytes(),
    )


@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_fused_with_others_everyone_has_the_bits_they_have_alone(load_model, make_datum, new_adapter, budget):
    if platform.machine() != "x86_64":
        pytest.skip("exact bits are promised on x86-64 only")
    model = load_model()
    alone = [said(model.forward_backward([job])[0], job) for job in jobs_of(model, make_datum, new_adapter)]
    fused_model = load_model("qwen3", budget)
    jobs = jobs_of(fused_model, make_datum, new_adapter)

    fused = [said(outcome, job) for outcome, job in zip(fused_model.forward_backward(jobs), jobs, strict=True)]

    assert fused == alone
    assert [isinstance(outcome[0], str) for outcome in fused] == [False, False, False, True, False]


def test_a_loss_that_fails_does_not_make_its_neighbours_run_again(load_model, make_datum, new_adapter, monkeypatch):
    model = load_model()
    num_passes = 0
    run_head = model._head.run

    def counted(*args):
        nonlocal num_passes
        num_passes += 1
        run_head(*args)

    monkeypatch.setattr(model._head, "run", counted)

    outcomes = model.forward_backward(jobs_of(model, make_datum, new_adapter))

    assert num_passes == 1
    assert "data[0]: custom loss 'failing' is nan" in str(outcomes[3])


@pytest.mark.parametrize("loss", ["policy", "preference"])
def test_one_pass_gives_the_gradient_that_a_client_gets_with_two(load_model, make_datum, new_adapter, loss):
    model = load_model()
    rng = np.random.default_rng(11)
    make, graph = (policy_datum, POLICY) if loss == "policy" else (preference_datum, PREFERENCE)
    data = tuple(make(make_datum, rng, length) for length in (6, 13, 3))
    ours, theirs = new_adapter(model, 1), new_adapter(model, 1)

    outcome = model.forward_backward([TrainJob(ours, data, "custom", graph=graph)])[0]

    weightless = tuple(
        with_inputs(datum, weights=np.zeros(datum.inputs["target_tokens"].shape, np.float32)) for datum in data
    )
    forward = model.forward_backward([TrainJob(theirs, weightless, "cross_entropy", backward=False)])[0]
    function = traced_losses.clipped_policy if loss == "policy" else traced_losses.preference
    total, weighted = 0.0, []
    for datum, logprobs in zip(data, forward.logprobs, strict=True):
        leaf = torch.from_numpy(logprobs).requires_grad_(True)
        inputs = list(TracedLoss(graph=graph).tensors(datum.inputs, torch.from_numpy).values())
        value, _ = function(leaf, *inputs)
        value.backward()
        total += value.item()
        weighted.append(with_inputs(datum, weights=-leaf.grad.numpy()))
    surrogate = model.forward_backward([TrainJob(theirs, tuple(weighted), "cross_entropy")])[0]

    assert outcome.loss == pytest.approx(total, rel=TOLERANCE)
    assert outcome.metrics["surrogate_loss:sum"] == pytest.approx(surrogate.loss, rel=TOLERANCE, abs=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip(outcome.logprobs, forward.logprobs, strict=True))
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=TOLERANCE, atol=TOLERANCE * float(theirs.grad.abs().max()))


def test_a_datum_longer_than_a_group_of_rows_is_judged_as_a_whole(load_model, make_datum, new_adapter, monkeypatch):
    model = load_model()
    rng = np.random.default_rng(5)
    job = TrainJob(new_adapter(model, 1), (policy_datum(make_datum, rng, 60),), "custom", graph=POLICY)
    whole = model.forward_backward([job])[0]
    gradient = job.adapter.grad.clone()
    job.adapter.clear_gradients()
    monkeypatch.setattr(model._head, "rows_per_group", 16)

    cut = model.forward_backward([job])[0]

    assert cut.loss == pytest.approx(whole.loss, rel=TOLERANCE)
    torch.testing.assert_close(job.adapter.grad, gradient, rtol=1e-4, atol=TOLERANCE * float(gradient.abs().max()))


def test_without_gradients_wanted_a_loss_is_only_told(load_model, make_datum, new_adapter):
    model = load_model()
    rng = np.random.default_rng(5)
    job = TrainJob(new_adapter(model, 1), (policy_datum(make_datum, rng, 9),), "custom", graph=POLICY, backward=False)

    outcome = model.forward_backward([job])[0]

    assert {"loss:sum", "num_tokens:sum", "surrogate_loss:sum", "custom/kl:mean"} <= outcome.metrics.keys()
    assert not job.adapter.has_gradients


def test_inputs_that_do_not_fit_the_declared_ranks_are_refused_by_field(load_model, make_datum, new_adapter):
    model = load_model()
    good = policy_datum(make_datum, np.random.default_rng(5), 6)
    without = Datum(good.tokens, {name: value for name, value in good.inputs.items() if name != "mask"})
    cases = {
        "data[0].loss_fn_inputs.mask": (without, POLICY),
        "data[0].loss_fn_inputs.advantages": (with_inputs(good, advantages=np.float32(1)), POLICY),
        "data[0].loss_fn_inputs.target_tokens": (good, PREFERENCE),
        "data[0].loss_fn_inputs.beta": (
            with_inputs(preference_datum(make_datum, np.random.default_rng(5), 6), beta=np.zeros(2, dtype=np.float32)),
            PREFERENCE,
        ),
        "loss_fn": (good, None),
    }
    jobs = [TrainJob(new_adapter(model, 1), (datum,), "custom", graph=graph) for datum, graph in cases.values()]

    outcomes = model.forward_backward(jobs)

    assert all(isinstance(outcome, InvalidInput) for outcome in outcomes)
    assert [outcome.field for outcome in outcomes] == list(cases)
