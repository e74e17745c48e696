"""Jobs: what is refused, what a failed job leaves behind, how memory is recovered."""

import math

import numpy as np
import pytest
import torch

from twinkle.core.errors import InvalidInput, OutOfMemory
from twinkle.model.fused.pass_size import PassSize
from twinkle.model.fused.step import FusedStep
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
from twinkle.module.lora import LoraConfig

CONFIG = LoraConfig(rank=4, seed=1)


@pytest.fixture
def model(load_model):
    return load_model()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def changed(datum, **inputs):
    return Datum(datum.tokens, {**datum.inputs, **inputs})


def without(datum, name):
    return Datum(datum.tokens, {key: value for key, value in datum.inputs.items() if key != name})


def test_bad_jobs_are_refused_by_field_and_their_neighbours_run(model, rng, make_datum):
    adapter = model.create_adapter(CONFIG)
    good = make_datum(rng, 6)
    nan = np.full(6, np.nan, dtype=np.float32)
    cases = [
        ((), "cross_entropy", "data"),
        ((good, Datum(np.zeros(0, dtype=np.int64), {})), "cross_entropy", "data[1].model_input"),
        ((Datum(np.array([0, 307]), {}),), "cross_entropy", "data[0].model_input"),
        ((Datum(np.array([0, -1]), {}),), "cross_entropy", "data[0].model_input"),
        ((make_datum(rng, 513),), "cross_entropy", "data[0].model_input"),
        ((without(good, "weights"),), "cross_entropy", "data[0].loss_fn_inputs.weights"),
        ((without(good, "target_tokens"),), "ppo", "data[0].loss_fn_inputs.target_tokens"),
        ((without(good, "sequence_ratio_mask"),), "gspo", "data[0].loss_fn_inputs.sequence_ratio_mask"),
        ((changed(good, target_tokens=np.zeros(5, np.int64)),), "ppo", "data[0].loss_fn_inputs.target_tokens"),
        ((changed(good, target_tokens=np.zeros(6)),), "ppo", "data[0].loss_fn_inputs.target_tokens"),
        ((changed(good, target_tokens=np.full(6, 999)),), "ppo", "data[0].loss_fn_inputs.target_tokens"),
        ((make_datum(rng, 6, columns=2),), "ppo", "data[0].loss_fn_inputs.target_tokens"),
        ((changed(good, weights=np.zeros(5, np.float32)),), "cross_entropy", "data[0].loss_fn_inputs.weights"),
        ((changed(good, weights=nan),), "cross_entropy", "data[0].loss_fn_inputs.weights"),
        ((changed(good, clip_low_threshold=nan),), "ppo", "data[0].loss_fn_inputs.clip_low_threshold"),
        ((good,), "policy_gradient", "loss_fn"),
    ]
    jobs = [TrainJob(adapter, data, loss) for data, loss, _ in cases]

    *refused, accepted = model.forward_backward([*jobs, TrainJob(adapter, (good,), "cross_entropy")])

    for (_, _, field), outcome in zip(cases, refused, strict=True):
        assert isinstance(outcome, InvalidInput)
        assert outcome.field == field
    assert not isinstance(accepted, Exception)


def test_top_k_targets_get_logprobs_of_their_shape_also_where_the_weight_is_zero(model, rng, make_datum):
    adapter = model.create_adapter(CONFIG)
    datum = make_datum(rng, 7, columns=3)
    datum = changed(datum, weights=np.zeros((7, 3), dtype=np.float32))

    [outcome] = model.forward_backward([TrainJob(adapter, (datum,), "cross_entropy")])

    assert outcome.logprobs[0].shape == (7, 3)
    assert outcome.logprobs[0].dtype == np.float32
    assert (outcome.logprobs[0] < 0).all()
    assert outcome.loss == 0
    assert not adapter.grad.any()


def test_forward_alone_leaves_no_gradient(model, rng, make_datum):
    adapter = model.create_adapter(CONFIG)
    data = (make_datum(rng, 20), make_datum(rng, 3))

    forward, both = model.forward_backward(
        [TrainJob(adapter, data, "ppo", {}, backward=False), TrainJob(model.create_adapter(CONFIG), data, "ppo")]
    )

    assert not adapter.has_gradients
    assert forward.loss == pytest.approx(both.loss, rel=1e-5)


@pytest.mark.parametrize("window_open", [True, False])
def test_a_failed_job_leaves_the_accumulated_gradient_as_it_was(window_open, model, rng, make_datum):
    adapter = model.create_adapter(CONFIG)
    if window_open:
        model.forward_backward([TrainJob(adapter, (make_datum(rng, 9),), "cross_entropy")])
    before = adapter.grad.clone()
    bad = changed(make_datum(rng, 9), weights=np.full(9, 3e38, dtype=np.float32))

    [outcome] = model.forward_backward([TrainJob(adapter, (make_datum(rng, 9), bad), "cross_entropy")])

    assert "not finite" in str(outcome)
    assert torch.equal(adapter.grad, before)
    assert adapter.has_gradients is window_open


def test_a_gradient_that_overflows_fails_the_job_though_its_loss_is_finite(model, rng, make_datum):
    adapter = model.create_adapter(LoraConfig(rank=4, alpha=1e6))
    healthy = make_datum(rng, 3)
    extreme = changed(make_datum(rng, 3), weights=np.full(3, 5e36, dtype=np.float32))
    model.forward_backward([TrainJob(adapter, (healthy,), "cross_entropy")])
    before = adapter.grad.clone()

    [outcome] = model.forward_backward([TrainJob(adapter, (extreme,), "cross_entropy")])

    assert "the gradient is not finite" in str(outcome)
    assert torch.equal(adapter.grad, before)


def test_an_exception_in_a_pass_fails_the_guilty_job_only(model, rng, make_datum, monkeypatch):
    healthy, guilty = model.create_adapter(CONFIG), model.create_adapter(CONFIG)
    ours = TrainJob(healthy, (make_datum(rng, 9), make_datum(rng, 4)), "cross_entropy")
    theirs = TrainJob(guilty, (make_datum(rng, 5), make_datum(rng, 6)), "cross_entropy")
    [expected] = model.forward_backward([ours])
    gradient = healthy.grad.clone()
    healthy.clear_gradients()
    run_pass = FusedStep._run_pass

    def fail_after_the_backward_pass(self, places, *, backward):
        run_pass(self, places, backward=backward)
        if any(run.job is theirs for run, _ in places):
            raise RuntimeError("a kernel failed")

    monkeypatch.setattr(FusedStep, "_run_pass", fail_after_the_backward_pass)

    failed, outcome = model.forward_backward([theirs, ours])

    assert str(failed) == "a kernel failed"
    assert not guilty.has_gradients and not guilty.grad.any()
    assert outcome.loss == expected.loss
    assert torch.equal(healthy.grad, gradient)


def test_when_memory_runs_out_passes_get_smaller_until_a_single_datum_does_not_fit(model, rng, make_datum, monkeypatch):
    small, large = model.create_adapter(CONFIG), model.create_adapter(CONFIG)
    ours = TrainJob(small, tuple(make_datum(rng, 20) for _ in range(5)), "cross_entropy")
    theirs = TrainJob(large, (make_datum(rng, 10), make_datum(rng, 60)), "cross_entropy")
    model.forward_backward([ours])
    gradient = small.grad.clone()
    small.clear_gradients()
    run_pass = FusedStep._run_pass

    def run_within_50_tokens(self, places, *, backward):
        run_pass(self, places, backward=backward)
        if sum(run.job.data[index].tokens.size for run, index in places) > 50:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(FusedStep, "_run_pass", run_within_50_tokens)
    # What fits is remembered: not for the tests after this one.
    monkeypatch.setattr(model._step, "_sizes", {backward: PassSize(1024) for backward in (True, False)})

    outcome, failed = model.forward_backward([ours, theirs])

    assert isinstance(failed, OutOfMemory)
    assert not large.has_gradients and not large.grad.any()
    assert not isinstance(outcome, Exception)
    assert torch.equal(small.grad, gradient)


def test_a_long_datum_goes_through_the_head_in_pieces_with_the_same_result(model, rng, make_datum, monkeypatch):
    data = (make_datum(rng, 70), make_datum(rng, 5))
    for loss in ("cross_entropy", "gspo"):
        whole, pieces = model.create_adapter(CONFIG), model.create_adapter(CONFIG)
        expected = model.forward_backward([TrainJob(whole, data, loss)])[0]
        with monkeypatch.context() as patched:
            patched.setattr(model._head, "rows_per_group", 32)
            outcome = model.forward_backward([TrainJob(pieces, data, loss)])[0]
        assert outcome.loss == pytest.approx(expected.loss, rel=1e-5)
        np.testing.assert_allclose(outcome.logprobs[0], expected.logprobs[0], rtol=1e-5)
        torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-4, atol=1e-5 * whole.grad.abs().max().item())


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=1e-2),
        AdamParams(learning_rate=1e-2, beta1=0.5, beta2=0.9, eps=1e-4, weight_decay=0.1),
        AdamParams(learning_rate=1e-2, grad_clip_norm=0.5),
    ],
)
def test_steps_are_those_of_torch_adamw(params, model, rng, make_datum):
    adapter = model.create_adapter(CONFIG)
    twin = torch.nn.Parameter(adapter.params.clone())
    optimizer = torch.optim.AdamW(
        [twin],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for _ in range(4):
        model.forward_backward([TrainJob(adapter, (make_datum(rng, 15),), "cross_entropy")])
        twin.grad = adapter.grad.clone()
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([twin], params.grad_clip_norm)
        norm = adapter.grad.norm().item()

        metrics = model.optim_step(adapter, params)
        optimizer.step()

        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert not adapter.has_gradients and not adapter.grad.any()
        # Clipping rounds a little differently: torch divides by norm + 1e-6.
        torch.testing.assert_close(adapter.params, twin.detach(), rtol=1e-4, atol=1e-5)


def test_a_step_without_gradients_lets_the_moments_decay(model, rng, make_datum):
    adapter = model.create_adapter(CONFIG)
    model.forward_backward([TrainJob(adapter, (make_datum(rng, 5),), "cross_entropy")])
    model.optim_step(adapter, AdamParams())
    before = adapter.exp_avg.clone()

    metrics = model.optim_step(adapter, AdamParams())

    assert metrics["grad_norm"] == 0
    assert metrics["step"] == adapter.step == 2
    torch.testing.assert_close(adapter.exp_avg, before * 0.9)


def test_eps_zero_does_not_turn_weights_without_gradient_into_nan(model):
    adapter = model.create_adapter(CONFIG)
    before = adapter.params.clone()
    model.optim_step(adapter, AdamParams(eps=0.0))
    assert torch.equal(adapter.params, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", -1.0), ("learning_rate", math.nan), ("beta1", 1.0), ("beta2", -0.1), ("eps", math.inf)],
)
def test_impossible_optimizer_settings_are_refused_by_field(name, value, model):
    adapter = model.create_adapter(CONFIG)
    with pytest.raises(InvalidInput, match=rf"adam_params\.{name}"):
        model.optim_step(adapter, AdamParams(**{name: value}))
    assert adapter.step == 0


@pytest.mark.parametrize("config", [LoraConfig(rank=0), LoraConfig(rank=257), LoraConfig(rank=4, alpha=math.nan)])
def test_impossible_adapters_are_refused(config, model):
    with pytest.raises(InvalidInput, match="lora_config"):
        model.create_adapter(config)


def test_the_seed_alone_decides_the_first_weights(model):
    first = model.create_adapter(CONFIG)
    torch.rand(5)
    model.create_adapter(LoraConfig(rank=9, seed=5))
    assert torch.equal(first.params, model.create_adapter(CONFIG).params)
    assert not torch.equal(first.params, model.create_adapter(LoraConfig(rank=4, seed=2)).params)


def test_an_adapter_for_sampling_is_not_trained(model, rng, make_datum):
    adapter = model.create_adapter(CONFIG, trainable=False)
    [outcome] = model.forward_backward([TrainJob(adapter, (make_datum(rng, 5),), "cross_entropy")])
    assert isinstance(outcome, InvalidInput)
    with pytest.raises(InvalidInput):
        model.optim_step(adapter, AdamParams())


def test_of_cross_entropy_it_is_told_how_many_tokens_were_found_the_likeliest(model, rng, make_datum):
    adapter = model.create_adapter(CONFIG)
    data = [make_datum(rng, 40), make_datum(rng, 7)]
    lengths = [len(datum.tokens) for datum in data]
    every = [np.tile(np.arange(307), (length, 1)) for length in lengths]
    whole = [
        changed(datum, target_tokens=all_tokens, weights=np.zeros(all_tokens.shape))
        for datum, all_tokens in zip(data, every, strict=True)
    ]
    (seen,) = model.forward_backward([TrainJob(adapter, tuple(whole), "cross_entropy", backward=False)])
    best = [logprobs.argmax(-1) for logprobs in seen.logprobs]
    numbers = [np.arange(length) for length in lengths]
    half = tuple(
        changed(datum, target_tokens=np.where(number % 3 == 0, row, (row + 1) % 307), weights=number % 2)
        for datum, row, number in zip(data, best, numbers, strict=True)
    )

    plain = TrainJob(adapter, half, "cross_entropy", backward=False)
    counting = TrainJob(adapter, half, "cross_entropy", {"count_correct": 1}, backward=False)
    without, told = model.forward_backward([plain, counting])

    expected = sum(((number % 3 == 0) & (number % 2 == 1)).sum() for number in numbers)
    assert told.metrics["correct_tokens:sum"] == expected > 0
    assert without.metrics == {name: value for name, value in told.metrics.items() if name != "correct_tokens:sum"}
