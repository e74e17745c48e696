"""Preference losses against formulas written out pair by pair, and against finite differences."""

import math

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss


def nsig(x):
    """-log sigmoid(x)."""
    return math.log1p(math.exp(-x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def shifted(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    return batch.logps - 0.5 * torch.rand(batch.logps.shape, generator=generator, dtype=torch.float64)


def log_ratios(batch, ref):
    sums = [sum(row) - sum(ref_row) for row, ref_row in zip(batch.rows(), batch.rows(ref), strict=True)]
    return list(zip(sums[0::2], sums[1::2], strict=True))


def chosen_nll(batch):
    tokens = [lp for row in batch.rows()[0::2] for lp in row]
    return -sum(tokens) / max(1, len(tokens))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def kto_reference(pairs, beta):
    z_w, z_l = max(0.0, mean(w for w, _ in pairs)), max(0.0, mean(lo for _, lo in pairs))
    return mean((1 - sigmoid(beta * (w - z_l)) + 1 - sigmoid(beta * (z_w - lo))) / 2 for w, lo in pairs)


DPO_KINDS = [
    ({}, lambda pairs: mean(nsig(0.1 * (w - lo)) for w, lo in pairs)),
    (
        {"beta": 0.5, "label_smoothing": 0.1},
        lambda pairs: mean(0.9 * nsig(0.5 * (w - lo)) + 0.1 * nsig(-0.5 * (w - lo)) for w, lo in pairs),
    ),
    ({"loss_type": "hinge", "beta": 0.6}, lambda pairs: mean(max(0.0, 1 - 0.6 * (w - lo)) for w, lo in pairs)),
    ({"loss_type": "ipo", "beta": 0.4}, lambda pairs: mean((0.4 * (w - lo) - 1.25) ** 2 for w, lo in pairs)),
    ({"loss_type": "kto_pair", "beta": 0.3}, lambda pairs: kto_reference(pairs, 0.3)),
    ({"beta": 0.0}, lambda pairs: math.log(2)),
]


@pytest.mark.parametrize(("settings", "formula"), DPO_KINDS)
def test_dpo_is_the_formula_of_its_type(make_batch, settings, formula):
    for seed in range(3):
        batch = make_batch(seed)
        ref = shifted(batch, seed)
        expected = formula(log_ratios(batch, ref))
        assert batch.value(DPOLoss(**settings), ref_logps=ref) == pytest.approx(expected, rel=1e-9)
        with_likelihood = batch.value(DPOLoss(sft_weight=0.7, **settings), ref_logps=ref)
        assert with_likelihood == pytest.approx(expected + 0.7 * chosen_nll(batch), rel=1e-9)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_the_gradient_of_dpo_is_that_of_finite_differences(make_batch, loss_type):
    batch = make_batch(4)
    loss = DPOLoss(beta=0.3, label_smoothing=0.1, loss_type=loss_type, sft_weight=0.2)
    assert batch.check_gradient(loss, ref_logps=shifted(batch, 4))


def test_the_baseline_of_kto_pairs_gets_no_gradient(make_batch):
    batch = make_batch(5)
    ref, beta = shifted(batch, 5), 0.3
    pairs = log_ratios(batch, ref)
    z_w, z_l = (max(0.0, mean(column)) for column in zip(*pairs, strict=True))
    per_row = []
    for w, lo in pairs:
        kept, shunned = sigmoid(beta * (w - z_l)), sigmoid(beta * (z_w - lo))
        per_row += [-beta * kept * (1 - kept) / 4, beta * shunned * (1 - shunned) / 4]
    expected = torch.tensor(per_row, dtype=torch.float64)[:, None] * batch.mask
    torch.testing.assert_close(batch.gradient(DPOLoss(beta=beta, loss_type="kto_pair"), ref_logps=ref), expected)


def test_the_reference_comes_as_tokens_as_outputs_or_as_sums(make_batch):
    batch = make_batch(6)
    ref = shifted(batch, 6)
    expected = batch.value(DPOLoss(), ref_logps=ref)
    sums = (ref * batch.mask).sum(1)
    assert batch.value(DPOLoss(), ref_outputs={"logps": ref}) == expected
    assert batch.value(DPOLoss(), ref_chosen_logps=sums[0::2], ref_rejected_logps=sums[1::2]) == pytest.approx(expected)
    assert batch.value(DPOLoss(), ref_logps=batch.rows(ref)) == pytest.approx(expected)


def test_a_model_that_equals_its_reference_is_undecided(make_batch):
    batch = make_batch(7)
    assert batch.value(DPOLoss(), ref_logps=batch.logps) == pytest.approx(math.log(2))


def test_without_a_reference_the_loss_is_zero_unless_it_needs_none(make_batch):
    batch = make_batch(8)
    assert batch.value(DPOLoss()) == 0
    assert not batch.gradient(DPOLoss()).any()
    free = batch.value(DPOLoss(reference_free=True))
    assert free == pytest.approx(batch.value(DPOLoss(), ref_logps=torch.zeros_like(batch.logps)))


def test_simpo_compares_means_with_a_margin(make_batch):
    batch = make_batch(9)
    means = [mean(row) for row in batch.rows()]
    expected = mean(nsig(2.0 * (w - lo) - 0.3) for w, lo in zip(means[0::2], means[1::2], strict=True))
    assert batch.value(SimPOLoss(2.0, 0.3)) == pytest.approx(expected, rel=1e-9)
    assert batch.check_gradient(SimPOLoss())


def test_cpo_adds_the_likelihood_of_the_chosen(make_batch):
    batch = make_batch(10)
    sums = [sum(row) for row in batch.rows()]
    preference = mean(nsig(0.2 * (w - lo)) for w, lo in zip(sums[0::2], sums[1::2], strict=True))
    assert batch.value(CPOLoss(0.2, 0.5)) == pytest.approx(preference + 0.5 * chosen_nll(batch), rel=1e-9)
    assert batch.check_gradient(CPOLoss())


def test_orpo_compares_odds(make_batch):
    batch = make_batch(11)
    p = [math.exp(mean(row)) for row in batch.rows()]
    odds = [q / (1 - q) for q in p]
    preference = mean(nsig(math.log(w / lo)) for w, lo in zip(odds[0::2], odds[1::2], strict=True))
    assert batch.value(ORPOLoss(0.4)) == pytest.approx(chosen_nll(batch) + 0.4 * preference, rel=1e-9)
    assert batch.check_gradient(ORPOLoss())


@pytest.mark.parametrize(
    "loss",
    [DPOLoss(reference_free=True), SimPOLoss(), CPOLoss(), ORPOLoss(), DPOLoss(reference_free=True, sft_weight=1)],
)
def test_a_row_without_trained_tokens_leaves_everything_finite(make_batch, loss):
    for empty in (0, 1):
        batch = make_batch(12, num_rows=2, empty_row=empty)
        assert math.isfinite(batch.value(loss))
        gradient = batch.gradient(loss)
        assert gradient.isfinite().all()
        assert not gradient[empty].any()


def test_rows_that_are_no_pairs_and_unusable_settings_are_refused(make_batch):
    for loss in (DPOLoss(reference_free=True), SimPOLoss(), CPOLoss(), ORPOLoss()):
        with pytest.raises(InvalidInput, match="has 3 rows; preference losses take pairs"):
            make_batch(num_rows=3).value(loss)
    with pytest.raises(InvalidInput, match="loss_type: is 'cubic'"):
        DPOLoss(loss_type="cubic")
    with pytest.raises(InvalidInput, match="beta: is 0"):
        DPOLoss(beta=0.0, loss_type="ipo")
