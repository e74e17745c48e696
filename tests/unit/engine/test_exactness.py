"""Bits: a job's result does not depend on its company, on how passes are cut, or on a restore in between."""

import hashlib
import platform

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.families import FAMILIES
from twinkle.checkpoint_engine.snapshot import restore, snapshot
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
from twinkle.module.lora import LoraConfig

CONFIGS = [
    LoraConfig(rank=8, seed=1),
    LoraConfig(rank=3, alpha=5.0, seed=2, train_mlp=False),
    LoraConfig(rank=16, seed=3, train_unembed=False),
    LoraConfig(rank=1, seed=4, train_attn=False),
]
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]


@pytest.fixture(autouse=True)
def _strict(load_model):
    if platform.machine() != "x86_64":
        pytest.skip("exact bits are promised on x86-64 only")
    assert load_model().determinism != "none"


def digest(*tensors):
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def poisoned(datum):
    weights = datum.inputs["advantages"].copy()
    weights[0] = 3e38
    logprobs = np.full_like(datum.inputs["logprobs"], -3e38)
    return Datum(datum.tokens, {**datum.inputs, "advantages": weights, "weights": weights, "logprobs": logprobs})


class Tenant:
    """An adapter that has made one step, and the job it wants to run."""

    def __init__(self, model, make_datum, plan):
        config, loss, lengths, seed, window, backward, poison = plan
        rng = np.random.default_rng(seed)
        self.model = model
        self.adapter = model.create_adapter(CONFIGS[config])
        self.adapter.params.copy_(torch.from_numpy(rng.normal(0, 0.05, self.adapter.params.numel())))
        data = tuple(make_datum(rng, length) for length in lengths)
        if poison:
            data = (*data[:-1], poisoned(data[-1]))
        if window:
            first = TrainJob(self.adapter, (make_datum(rng, 9),), "cross_entropy")
            assert not isinstance(model.forward_backward([first])[0], Exception)
        self.job = TrainJob(self.adapter, data, loss, {}, backward)

    def result(self, outcome):
        if isinstance(outcome, Exception):
            return str(outcome), digest(self.adapter.grad), self.adapter.has_gradients
        return (
            outcome.loss,
            [logprobs.tobytes() for logprobs in outcome.logprobs],
            digest(self.adapter.grad),
            self.adapter.has_gradients,
        )


plans = st.lists(
    st.tuples(
        st.integers(0, len(CONFIGS) - 1),
        st.sampled_from(LOSSES),
        st.lists(st.integers(1, 40), min_size=1, max_size=4),
        st.integers(0, 10_000),
        st.booleans(),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3-moe", "qwen2-moe", "qwen3_5", "nemotron-h", pytest.param("deepseek-v4", marks=pytest.mark.soak)],
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans=plans, budget=st.sampled_from([1, 37, 90, 4096]))
def test_any_mix_fused_equals_each_job_alone_bit_by_bit(family, plans, budget, load_model, make_datum):
    alone_model = load_model(family)
    alone = []
    for plan in plans:
        tenant = Tenant(alone_model, make_datum, plan)
        alone.append(tenant.result(alone_model.forward_backward([tenant.job])[0]))
    fused_model = load_model(family, budget)
    tenants = [Tenant(fused_model, make_datum, plan) for plan in plans]

    outcomes = fused_model.forward_backward([tenant.job for tenant in tenants])

    assert [tenant.result(outcome) for tenant, outcome in zip(tenants, outcomes, strict=True)] == alone


@pytest.mark.parametrize("family", ["deepseek-v2", "llama4"])
def test_positions_that_are_turned_as_complex_numbers_have_the_bits_of_each_job_alone(family, load_model, make_datum):
    """Where a row has few of them, whole vectors of them seldom end where a sequence does."""
    plans = [(0, "cross_entropy", [3, 67, 9], 1, False, True, False), (1, "cross_entropy", [9], 2, False, True, False)]
    model = load_model(family)
    alone = []
    for plan in plans:
        tenant = Tenant(model, make_datum, plan)
        alone.append(tenant.result(model.forward_backward([tenant.job])[0]))
    tenants = [Tenant(model, make_datum, plan) for plan in plans]

    outcomes = model.forward_backward([tenant.job for tenant in tenants])

    assert [tenant.result(outcome) for tenant, outcome in zip(tenants, outcomes, strict=True)] == alone


def test_a_poisoned_job_fails_and_names_the_datum(load_model, make_datum):
    model = load_model()
    healthy = Tenant(model, make_datum, (0, "ppo", [5, 6], 1, False, True, False))
    sick = Tenant(model, make_datum, (1, "importance_sampling", [5, 6], 2, False, True, True))

    ours, theirs = model.forward_backward([healthy.job, sick.job])

    assert not isinstance(ours, Exception)
    assert "not finite in data[1]" in str(theirs)
    assert not sick.adapter.has_gradients
    assert not sick.adapter.grad.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_nan_poison_their_own_tenant_only(family, load_model, make_datum):
    model = load_model(family)
    assert model.determinism != "none"
    plan = (0, "cross_entropy", [17, 3], 5, False, True, False)
    alone = Tenant(model, make_datum, plan)
    expected = alone.result(model.forward_backward([alone.job])[0])
    healthy = Tenant(model, make_datum, plan)
    sick = Tenant(model, make_datum, (2, "cross_entropy", [20], 6, False, True, False))
    sick.adapter.params.fill_(float("nan"))

    theirs, ours = model.forward_backward([sick.job, healthy.job])

    assert "not finite" in str(theirs)
    assert healthy.result(ours) == expected


def test_two_jobs_of_one_adapter_in_one_call_equal_two_calls(load_model, make_datum):
    model = load_model()
    rng = np.random.default_rng(3)
    batches = [tuple(make_datum(rng, length) for length in lengths) for lengths in ([4, 9], [13], [2, 2])]
    separate, together = model.create_adapter(CONFIGS[0]), model.create_adapter(CONFIGS[0])

    for data in batches:
        model.forward_backward([TrainJob(separate, data, "cross_entropy")])
    model.forward_backward([TrainJob(together, data, "cross_entropy") for data in batches])

    assert torch.equal(separate.grad, together.grad)


def train(model, make_datum, tenants, steps, *, start=0):
    """Steps of several adapters fused, in an order that changes with the step."""
    for step in range(start, start + steps):
        jobs = []
        for number, adapter in tenants:
            rng = np.random.default_rng([number, step])
            lengths = rng.integers(1, 60, rng.integers(1, 4))
            jobs.append(TrainJob(adapter, tuple(make_datum(rng, length) for length in lengths), LOSSES[number]))
        order = np.random.default_rng(step).permutation(len(jobs))
        outcomes = model.forward_backward([jobs[index] for index in order])
        assert not any(isinstance(outcome, Exception) for outcome in outcomes)
        for _, adapter in tenants:
            model.optim_step(adapter, AdamParams(learning_rate=1e-3, grad_clip_norm=1.0, weight_decay=0.01))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_restored_tenant_alone_ends_with_the_bits_of_the_undisturbed_fused_run(family, load_model, make_datum):
    model = load_model(family)
    tenants = [(number, model.create_adapter(config)) for number, config in enumerate(CONFIGS)]
    train(model, make_datum, tenants, 4)
    saved = [(number, snapshot(adapter, model.determinism)) for number, adapter in tenants]
    train(model, make_datum, tenants, 5, start=4)

    other_model = load_model(family, 50)
    for (number, content), (_, expected) in zip(saved, tenants, strict=True):
        restored = restore(other_model.pool, content, other_model.determinism)
        train(other_model, make_datum, [(number, restored)], 5, start=4)
        assert restored.step == expected.step == 9
        assert snapshot(restored, model.determinism) == snapshot(expected, model.determinism)


def test_a_snapshot_keeps_an_open_window(load_model, make_datum):
    model = load_model()
    adapter = model.create_adapter(CONFIGS[0])
    model.forward_backward([TrainJob(adapter, (make_datum(np.random.default_rng(0), 5),), "cross_entropy")])

    restored = restore(model.pool, snapshot(adapter, model.determinism), model.determinism)

    assert restored.has_gradients
    assert torch.equal(restored.grad, adapter.grad)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen3_5"])
def test_bits_do_not_depend_on_the_number_of_threads(family, load_model, make_datum):
    model = load_model(family)
    if model.determinism != "mkl-strict":
        pytest.skip("only promised in MKL's strict mode")
    digests = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        try:
            tenants = [(number, model.create_adapter(config)) for number, config in enumerate(CONFIGS)]
            train(model, make_datum, tenants, 2)
        finally:
            torch.set_num_threads(1)
        digests.append([digest(adapter.params) for _, adapter in tenants])

    assert digests[0] == digests[1]


def test_a_model_that_mixes_rows_is_not_said_to_be_exact(base_dirs, monkeypatch):
    monkeypatch.setattr("twinkle.module.packed_attention.CausalSpans.__call__", mixing_attention)
    model = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")))
    assert model.determinism == "none"


def mixing_attention(self, layer_index, query, key, value, *, form):
    attended = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=form.scale,
            enable_gqa=True,
        ).transpose(1, 2)
        for start, end in self.spans
    ]
    return torch.cat(attended, dim=1) * (1 + 1e-6 * (len(self.spans) - 1))
