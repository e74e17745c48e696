"""Likelihood losses against sums written out in float64."""

import math

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, MSELoss


def make_logits(seed=0, num_rows=3, length=5, vocab=7):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, length, vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, (num_rows, length), generator=generator)
    labels[0, 1:3] = -100
    labels[2] = -100
    return logits, labels


def reference_logps(logits, labels):
    found = []
    for row, targets in zip(logits.tolist(), labels.tolist(), strict=True):
        for scores, target in zip(row, targets, strict=True):
            if target != -100:
                found.append(scores[target] - math.log(sum(math.exp(score) for score in scores)))
    return found


def test_cross_entropy_is_the_mean_or_the_sum_with_its_token_count(make_batch):
    batch = make_batch()
    tokens = [lp for row in batch.rows() for lp in row]
    assert batch.value(CrossEntropyLoss()) == pytest.approx(-sum(tokens) / len(tokens), rel=1e-12)
    summed = CrossEntropyLoss(-100, "sum")({"labels": batch.labels}, {"logps": batch.logps})
    assert summed["loss"].item() == pytest.approx(-sum(tokens), rel=1e-12)
    assert summed["num_tokens"] == len(tokens)
    assert batch.check_gradient(CrossEntropyLoss())


def test_dynamic_fine_tuning_weighs_a_token_by_its_fixed_probability(make_batch):
    batch = make_batch(1)
    loss = CrossEntropyLoss(reduction="sum", dft=True)
    assert batch.value(loss) == pytest.approx(-sum(math.exp(lp) * lp for row in batch.rows() for lp in row), rel=1e-12)
    expected = -batch.logps.exp() * batch.mask
    torch.testing.assert_close(batch.gradient(loss), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_trained_tokens_costs_nothing_and_moves_nothing(make_batch, reduction):
    batch = make_batch()
    batch.labels.fill_(-100)
    assert batch.value(CrossEntropyLoss(reduction=reduction)) == 0
    assert not batch.gradient(CrossEntropyLoss(reduction=reduction)).any()


def test_what_stands_at_ignored_positions_does_not_matter_even_if_it_is_not_a_number(make_batch):
    batch = make_batch(2)
    before = batch.value(CrossEntropyLoss()), batch.gradient(CrossEntropyLoss())
    batch.logps[~batch.mask] = math.nan
    assert batch.value(CrossEntropyLoss()) == before[0]
    assert torch.equal(batch.gradient(CrossEntropyLoss()), before[1])


@pytest.mark.parametrize("dft", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunks_give_the_value_and_the_gradient_of_the_whole(chunk_size, dft):
    logits, labels = make_logits()
    for reduction in ("mean", "sum"):
        results = []
        for loss in (ChunkedCrossEntropyLoss(chunk_size, -100, reduction, dft), CrossEntropyLoss(-100, reduction, dft)):
            leaf = logits.clone().requires_grad_(True)
            result = loss({"labels": labels}, {"logits": leaf})
            result["loss"].backward()
            results.append((result["loss"].detach(), leaf.grad, torch.tensor(result["num_tokens"])))
        for ours, whole in zip(*results, strict=True):
            torch.testing.assert_close(ours, whole)


def test_cross_entropy_from_logits_is_the_formula():
    logits, labels = make_logits(3)
    logps = reference_logps(logits, labels)
    loss = ChunkedCrossEntropyLoss(2)
    assert loss({"labels": labels}, {"logits": logits})["loss"].item() == pytest.approx(-sum(logps) / len(logps))
    leaf = logits.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: loss({"labels": labels}, {"logits": x})["loss"], leaf)


def test_smoothing_and_cap_are_those_of_the_formula():
    logits, labels = make_logits(4)
    loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.2, softcap=1.5)
    capped = 1.5 * torch.tanh(logits / 1.5)
    trained = labels != -100
    expected = -0.8 * sum(reference_logps(capped, labels)) - 0.2 * torch.log_softmax(capped, -1)[trained].mean(-1).sum()
    result = loss({"labels": labels}, {"logits": logits})
    assert result["loss"].item() == pytest.approx(expected.item(), rel=1e-9)
    assert result["num_tokens"] == int(trained.sum())
    leaf = logits.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: loss({"labels": labels}, {"logits": x})["loss"], leaf)


def test_without_logits_the_fused_name_is_plain_cross_entropy_and_refuses_more(make_batch):
    batch = make_batch()
    assert batch.value(LigerFusedLinearCrossEntropyLoss()) == batch.value(CrossEntropyLoss(reduction="sum"))
    with pytest.raises(InvalidInput, match=r"outputs\.logits: are missing"):
        batch.value(LigerFusedLinearCrossEntropyLoss(softcap=30.0))


def test_mean_squared_error_is_over_all_labels():
    labels, predicted = torch.tensor([1, 2, 4]), torch.tensor([[1.5], [2.0], [1.0]], dtype=torch.float64)
    result = MSELoss()({"labels": labels}, {"logits": predicted})
    assert result["loss"].item() == pytest.approx((0.25 + 0 + 9) / 3)
    leaf = predicted.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: MSELoss()({"labels": labels}, {"logits": x})["loss"], leaf)
    with pytest.raises(InvalidInput, match="hold 3 values for 2 labels"):
        MSELoss()({"labels": labels[:2]}, {"logits": predicted})


def test_half_precision_logprobs_are_summed_in_single_precision(make_batch):
    batch = make_batch()
    result = CrossEntropyLoss()({"labels": batch.labels}, {"logps": batch.logps.bfloat16()})
    assert result["loss"].dtype == torch.float32


def test_unusable_settings_and_shapes_are_refused(make_batch):
    batch = make_batch()
    with pytest.raises(InvalidInput, match="reduction: is 'median'"):
        CrossEntropyLoss(reduction="median")
    with pytest.raises(InvalidInput, match="chunk_size: is 0"):
        ChunkedCrossEntropyLoss(0)
    with pytest.raises(InvalidInput, match=r"outputs\.logps: has shape"):
        CrossEntropyLoss()({"labels": batch.labels}, {"logps": batch.logps[:, 1:]})
    with pytest.raises(InvalidInput, match=r"outputs\.logits: is missing"):
        CrossEntropyLoss()({"labels": batch.labels}, {})
