"""The GRPO family against formulas written out token by token, and against finite differences."""

import math

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss

ADVANTAGES = [0.7, -1.1, 0.0, 2.0]


def shifted(batch, seed, spread=0.4):
    generator = torch.Generator().manual_seed(100 + seed)
    return batch.logps + spread * torch.randn(batch.logps.shape, generator=generator, dtype=torch.float64)


def clipped_term(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, low), high) * advantage)


def grpo_term(lp, old, advantage, row_ratio):
    return clipped_term(math.exp(lp - old), advantage, 0.8, 1.2)


def gspo_term(lp, old, advantage, row_ratio):
    return clipped_term(row_ratio, advantage, 0.8, 1.2)


def sapo_term(lp, old, advantage, row_ratio):
    tau = 1.5 if advantage > 0 else 2.5
    return -advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(lp - old) - 1)))


def cispo_term(lp, old, advantage, row_ratio):
    return -min(math.exp(lp - old), 1.2) * advantage * lp


def row_mean(rows):
    return sum(sum(row) / len(row) if row else 0.0 for row in rows) / len(rows)


def token_mean(rows):
    return sum(map(sum, rows)) / sum(map(len, rows))


def reference(term, average, batch, old_BT, ref_BT=None, beta=0.0):
    losses = []
    ref_rows = batch.rows(ref_BT) if ref_BT is not None else batch.rows()
    for row, old_row, ref_row, advantage in zip(batch.rows(), batch.rows(old_BT), ref_rows, ADVANTAGES, strict=True):
        row_ratio = math.exp(sum(a - b for a, b in zip(row, old_row, strict=True)) / max(1, len(row)))
        losses.append(
            [
                term(lp, old, advantage, row_ratio) + beta * (math.exp(ref - lp) - (ref - lp) - 1)
                for lp, old, ref in zip(row, old_row, ref_row, strict=True)
            ]
        )
    return average(losses)


FAMILY = [
    (GRPOLoss, {}, grpo_term, row_mean),
    (GSPOLoss, {}, gspo_term, row_mean),
    (SAPOLoss, {"tau_pos": 1.5, "tau_neg": 2.5}, sapo_term, row_mean),
    (CISPOLoss, {}, cispo_term, token_mean),
    (BNPOLoss, {}, grpo_term, token_mean),
    (DRGRPOLoss, {"max_completion_length": 50}, grpo_term, lambda rows: sum(map(sum, rows)) / (len(rows) * 50)),
]


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(("kind", "settings", "term", "average"), FAMILY)
def test_the_value_is_the_formula(make_batch, kind, settings, term, average, beta):
    for seed in range(3):
        batch = make_batch(seed, empty_row=3 if seed == 1 else None)
        old_BT, ref_BT = shifted(batch, seed), shifted(batch, seed + 50)
        loss = kind(beta=beta, **settings)
        value = batch.value(loss, advantages=ADVANTAGES, old_logps=old_BT, ref_logps=ref_BT)
        assert value == pytest.approx(reference(term, average, batch, old_BT, ref_BT, beta), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "settings"), [(kind, settings) for kind, settings, _, _ in FAMILY if kind != CISPOLoss]
)
def test_the_gradient_is_that_of_finite_differences(make_batch, kind, settings):
    batch = make_batch(5, empty_row=2)
    loss = kind(beta=0.2, **settings)
    assert batch.check_gradient(loss, advantages=ADVANTAGES, old_logps=shifted(batch, 5), ref_logps=shifted(batch, 6))


def test_the_weight_of_cispo_gets_no_gradient_and_clipped_tokens_keep_theirs(make_batch):
    batch = make_batch(7)
    old_BT = shifted(batch, 7, spread=1.0)
    ratio_BT = torch.exp(batch.logps - old_BT).clamp(max=1.2)
    advantages_B1 = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None]
    expected = torch.where(batch.mask, -ratio_BT * advantages_B1, 0.0) / batch.mask.sum()
    torch.testing.assert_close(batch.gradient(CISPOLoss(), advantages=ADVANTAGES, old_logps=old_BT), expected)


def test_without_logprobs_of_the_sampler_the_ratio_is_one_and_has_a_gradient(make_batch):
    batch = make_batch(8)
    assert batch.value(BNPOLoss(), advantages=[1.0] * 4) == pytest.approx(-1)
    expected = -batch.mask.double() / batch.mask.sum()
    torch.testing.assert_close(batch.gradient(BNPOLoss(), advantages=[1.0] * 4), expected)


def test_the_upper_bound_may_be_wider(make_batch):
    batch = make_batch(9)
    old_BT = batch.logps - math.log(1.5)
    assert batch.value(GRPOLoss(0.2, 0.4), advantages=[1.0] * 4, old_logps=old_BT) == pytest.approx(-1.4)
    assert batch.value(GRPOLoss(0.2), advantages=[-1.0] * 4, old_logps=old_BT) == pytest.approx(1.5)
    assert batch.value(GRPOLoss(0.2), advantages=[1.0] * 4, old_logps=batch.logps + 9) == pytest.approx(-math.exp(-9))


def test_entropy_is_rewarded_and_asked_for_only_when_it_counts(make_batch):
    batch = make_batch(10)
    loss = GRPOLoss(entropy_coef=0.5)
    assert loss.require_entropy
    assert not GRPOLoss().require_entropy
    entropies = torch.rand(batch.logps.shape, dtype=torch.float64)
    result = loss({"labels": batch.labels}, {"logps": batch.logps, "entropies": entropies}, advantages=[0.0] * 4)
    assert result["loss"].item() == pytest.approx(-0.5 * row_mean(batch.rows(entropies)))
    with pytest.raises(InvalidInput, match=r"outputs\.entropies"):
        batch.value(loss, advantages=[0.0] * 4)


@pytest.mark.parametrize("kind", [GRPOLoss, GSPOLoss, SAPOLoss, CISPOLoss, BNPOLoss, DRGRPOLoss])
def test_no_advantages_or_no_trained_token_is_a_zero_that_can_be_differentiated(make_batch, kind):
    batch = make_batch(11)
    assert batch.value(kind()) == 0
    assert not batch.gradient(kind()).any()
    batch.labels.fill_(-100)
    assert batch.value(kind(), advantages=ADVANTAGES, old_logps=shifted(batch, 1)) == 0
    assert not batch.gradient(kind(), advantages=ADVANTAGES).any()


@pytest.mark.parametrize("kind", [GRPOLoss, GSPOLoss, SAPOLoss, CISPOLoss, BNPOLoss, DRGRPOLoss])
def test_a_runaway_token_stays_finite(make_batch, kind):
    batch = make_batch(12)
    value = batch.value(kind(beta=0.1), advantages=[-1.0] * 4, old_logps=batch.logps - 800, ref_logps=batch.logps + 800)
    assert math.isfinite(value)
    assert batch.gradient(kind(), advantages=[-1.0] * 4, old_logps=batch.logps - 800).isfinite().all()


def test_cispo_divides_by_the_tokens_of_the_larger_batch(make_batch):
    batch = make_batch(13)
    num_tokens = int(batch.mask.sum())
    alone = batch.value(CISPOLoss(), advantages=ADVANTAGES)
    assert batch.value(CISPOLoss(), advantages=ADVANTAGES, num_items_in_batch=2 * num_tokens) == pytest.approx(
        alone / 2
    )


def test_a_divergence_without_a_reference_is_refused(make_batch):
    with pytest.raises(InvalidInput, match=r"ref_logps: are missing, beta is 0\.1"):
        make_batch().value(GRPOLoss(beta=0.1), advantages=ADVANTAGES)


def test_values_per_row_come_in_any_of_four_forms(make_batch):
    batch = make_batch(14)
    old_BT = shifted(batch, 14)
    expected = batch.value(GRPOLoss(), advantages=ADVANTAGES, old_logps=old_BT)
    trained_only = batch.rows(old_BT)
    longer = [[*row, 0.0, 0.0] for row in old_BT.tolist()]
    as_columns = torch.tensor(ADVANTAGES)[:, None]
    for old_logps in (trained_only, longer, [torch.tensor(row) for row in trained_only]):
        value = batch.value(GRPOLoss(), advantages=as_columns, old_logps=old_logps, unheard_of=1)
        assert value == pytest.approx(expected, rel=1e-6)


def test_one_row_may_come_without_a_list_around_it(make_batch):
    batch = make_batch(15, num_rows=1)
    (row,) = batch.rows(shifted(batch, 15))
    nested = batch.value(GRPOLoss(), advantages=[2.0], old_logps=[row])
    assert batch.value(GRPOLoss(), advantages=[2.0], old_logps=row) == pytest.approx(nested)


def test_values_that_fit_no_form_are_refused_with_their_row(make_batch):
    batch = make_batch(16, length=8)
    rows = batch.rows()
    rows[2] = [*rows[2][:1], 0.0] if len(rows[2]) != 2 else [0.0] * 3
    with pytest.raises(InvalidInput, match=r"old_logps\[2\]: has \d values"):
        batch.value(GRPOLoss(), advantages=ADVANTAGES, old_logps=rows)
    with pytest.raises(InvalidInput, match="advantages: has 3 entries, the batch 4 rows"):
        batch.value(GRPOLoss(), advantages=ADVANTAGES[:3])
