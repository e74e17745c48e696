"""Losses against formulas written out token by token in float64, and against finite differences."""

import math

import numpy as np
import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import DATUM_LOSSES, create_datum_loss

LENGTH = 9


def make_inputs(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(-2, 0.6, LENGTH), {
        "weights": rng.normal(size=LENGTH),
        "logprobs": rng.normal(-2, 0.6, LENGTH),
        "advantages": rng.normal(size=LENGTH) * (rng.random(LENGTH) < 0.8),
        "sequence_ratio_mask": (rng.random(LENGTH) < 0.6).astype(float),
    }


def clamp(value, low, high):
    return min(max(value, low), high)


def token_rows(lp, inputs):
    return [
        (lp[i], inputs["logprobs"][i], inputs["advantages"][i], math.exp(lp[i] - inputs["logprobs"][i]))
        for i in range(LENGTH)
    ]


def reference_gspo(lp, inputs, low, high):
    counted = [i for i in range(LENGTH) if inputs["sequence_ratio_mask"][i] != 0]
    s = math.exp(sum(lp[i] - inputs["logprobs"][i] for i in counted) / max(1, len(counted)))
    return -sum(min(s * a, clamp(s, low, high) * a) for a in inputs["advantages"])


REFERENCES = [
    ("cross_entropy", {}, lambda lp, inputs: -sum(w * x for w, x in zip(inputs["weights"], lp, strict=True))),
    ("importance_sampling", {}, lambda lp, inputs: -sum(r * a for _, _, a, r in token_rows(lp, inputs))),
    (
        "ppo",
        {},
        lambda lp, inputs: -sum(min(r * a, clamp(r, 0.8, 1.2) * a) for _, _, a, r in token_rows(lp, inputs)),
    ),
    (
        "ppo",
        {"clip_low_threshold": 0.5, "clip_high_threshold": "1.05"},
        lambda lp, inputs: -sum(min(r * a, clamp(r, 0.5, 1.05) * a) for _, _, a, r in token_rows(lp, inputs)),
    ),
    ("cispo", {}, lambda lp, inputs: -sum(clamp(r, 0, 4) * x * a for x, _, a, r in token_rows(lp, inputs))),
    (
        "dro",
        {"beta": 0.3, "unheard_of": "yes"},
        lambda lp, inputs: -sum(x * a - 0.15 * (x - q) ** 2 for x, q, a, _ in token_rows(lp, inputs)),
    ),
    (
        "gspo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        lambda lp, inputs: reference_gspo(lp, inputs, 0.9, 1.1),
    ),
    ("gspo", {}, lambda lp, inputs: reference_gspo(lp, inputs, 1 - 3e-4, 1 + 4e-4)),
    ("stable_reinforce", {}, lambda lp, inputs: -sum(r * a for _, _, a, r in token_rows(lp, inputs))),
    (
        "stable_reinforce",
        {"kl_coeff": 0.7},
        lambda lp, inputs: sum(
            -r * a + (0.7 * (r - 1 - math.log(r)) if a else 0) for _, _, a, r in token_rows(lp, inputs)
        ),
    ),
]


@pytest.mark.parametrize(("name", "config", "reference"), REFERENCES)
def test_the_value_is_the_formula_summed_over_tokens(name, config, reference):
    for seed in range(5):
        lp, inputs = make_inputs(seed)
        loss = create_datum_loss(name, config)
        value = loss(torch.tensor(lp), {key: torch.tensor(values) for key, values in inputs.items()})
        assert value.item() == pytest.approx(reference(lp, inputs), rel=1e-9)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro", "stable_reinforce"])
def test_the_gradient_is_that_of_finite_differences(name):
    lp, inputs = make_inputs(3)
    loss = create_datum_loss(name, {"kl_coeff": 0.2} if name == "stable_reinforce" else {})
    tensors = {key: torch.tensor(values) for key, values in inputs.items()}
    assert torch.autograd.gradcheck(lambda x: loss(x, tensors), torch.tensor(lp, requires_grad=True))


def test_the_ratio_of_cispo_and_the_sequence_ratio_of_gspo_get_no_gradient():
    lp, inputs = make_inputs(1)
    tensors = {key: torch.tensor(values) for key, values in inputs.items()}
    leaf = torch.tensor(lp, requires_grad=True)
    ratio = np.exp(lp - inputs["logprobs"])
    (cispo,) = torch.autograd.grad(create_datum_loss("cispo", {})(leaf, tensors), leaf)
    np.testing.assert_allclose(cispo.numpy(), -np.clip(ratio, 0, 4) * inputs["advantages"], rtol=1e-9)
    wide = create_datum_loss("gspo", {"clip_low_threshold": 0, "clip_high_threshold": 100})
    (gspo,) = torch.autograd.grad(wide(leaf, tensors), leaf)
    mask = inputs["sequence_ratio_mask"] != 0
    s = math.exp((lp - inputs["logprobs"])[mask].mean())
    np.testing.assert_allclose(gspo.numpy(), -s * inputs["advantages"], rtol=1e-9)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_a_datum_brings_override_the_configured_ones(name):
    lp, inputs = make_inputs(2)
    tensors = {key: torch.tensor(values) for key, values in inputs.items()}
    narrow = {"clip_low_threshold": torch.full((LENGTH,), 0.99), "clip_high_threshold": torch.full((LENGTH,), 1.01)}
    configured = create_datum_loss(name, {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01})
    brought = create_datum_loss(name, {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0})
    value = brought(torch.tensor(lp), {**tensors, **{k: v.double() for k, v in narrow.items()}})
    assert value.item() == pytest.approx(configured(torch.tensor(lp), tensors).item(), rel=1e-6)


def test_cross_entropy_sums_over_columns_of_targets():
    loss = create_datum_loss("cross_entropy", {})
    lp, weights = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(loss(lp, {"weights": weights}), -(lp * weights).sum())


def test_losses_that_may_be_sliced_are_sums_of_their_slices():
    lp, inputs = make_inputs(4)
    tensors = {key: torch.tensor(values) for key, values in inputs.items()}
    for name, kind in DATUM_LOSSES.items():
        loss = kind.from_config({})
        parts = sum(
            loss(torch.tensor(lp)[rows], {key: values[rows] for key, values in tensors.items()}).item()
            for rows in (slice(0, 4), slice(4, LENGTH))
        )
        whole = loss(torch.tensor(lp), tensors).item()
        assert (parts == pytest.approx(whole, rel=1e-9)) is kind.separable, name


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInput, match=r"loss_fn: 'cross_entropi'.*cispo, cross_entropy, custom, dro"):
        create_datum_loss("cross_entropi", {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "high"])
def test_a_threshold_that_is_no_finite_number_is_refused(value):
    with pytest.raises(InvalidInput, match=r"loss_fn_config\.clip_high_threshold"):
        create_datum_loss("ppo", {"clip_high_threshold": value})
