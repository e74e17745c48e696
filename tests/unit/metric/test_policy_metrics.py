"""Metrics of policies, critics and embeddings, against numbers worked out by hand."""

import math

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.metric import METRICS, CISPOMetric, EmbeddingMetric, GRPOMetric, GSPOMetric, PPOMetric, PPOValueMetric

LABELS = torch.tensor([[-100, 1, 2], [3, -100, -100]])
LOGPS = torch.tensor([[9.0, -1.0, -2.0], [-0.5, 9.0, 9.0]])
OLD = [[-1.5, -1.0], [-0.4]]
INPUTS, OUTPUTS = {"labels": LABELS}, {"logps": LOGPS}


def test_a_policy_is_compared_with_the_one_that_sampled():
    metric = GRPOMetric()
    metric.accumulate(INPUTS, OUTPUTS, old_logps=OLD, advantages=[1.0, -1.0], grad_norm=3)
    results = metric.calculate()
    differences = [0.5, -1.0, -0.1]
    kls = [math.exp(d) - 1 - d for d in differences]
    assert results == pytest.approx(
        {
            "train/policy_confidence": math.exp(-3.5 / 3),
            "train/mean_new_logp": -3.5 / 3,
            "train/mean_old_logp": -2.9 / 3,
            "train/logp_diff_mean": sum(differences) / 3,
            "train/approx_kl": sum(kls) / 3,
            "train/token_kl_max": max(kls),
            "train/token_ratio_max": math.exp(0.5),
            "train/clip_ratio_low": 0.0,
            "train/clip_ratio_high": 1 / 3,
            "train/clip_ratio": 1 / 3,
        },
        rel=1e-5,
    )
    assert metric.calculate() == {}


def test_rows_and_parts_of_outputs_are_taken_as_a_loop_has_them():
    whole, parts = GRPOMetric(), GRPOMetric()
    whole.accumulate(INPUTS, OUTPUTS, old_logps=OLD)
    rows = [{"labels": [-100, 1, 2], "messages": []}, {"labels": [3]}]
    parts.accumulate(rows, {"logps": [LOGPS[:1], LOGPS[1:, :1]], "loss": 1.0}, old_logps=OLD, advantages=[1.0, 1.0])
    found, expected = parts.calculate(), whole.calculate()
    assert {name: found[name] for name in expected} == expected


def test_rows_are_clipped_or_tokens_from_above_as_the_loss_does():
    for kind, high in ((GSPOMetric, 0.0), (CISPOMetric, 1 / 3), (PPOMetric, 0.0)):
        metric = kind(epsilon=0.2)
        metric.accumulate(INPUTS, OUTPUTS, old_logps=OLD, advantages=[[-1.0, -1.0], [1.0]])
        results = metric.calculate()
        assert results["train/clip_ratio_high"] == pytest.approx(high)
        # Row 0 has the mean -0.25: exp of it is below 0.8, and its advantage negative.
        low = {GSPOMetric: 1 / 2, CISPOMetric: 0.0, PPOMetric: 1 / 3}[kind]
        assert results["train/clip_ratio_low"] == pytest.approx(low)


def test_without_a_sampler_the_policy_tells_of_itself_alone():
    metric = GRPOMetric()
    metric.accumulate(INPUTS, {**OUTPUTS, "entropies": torch.full((2, 3), 0.7)})
    assert set(metric.calculate()) == {"train/policy_confidence", "train/mean_new_logp", "train/entropy"}
    with pytest.raises(InvalidInput, match="top_k_kl"):
        GRPOMetric(top_k_kl=-1)


def test_the_tokens_that_moved_furthest_are_named_with_their_rows():
    metric = GRPOMetric(top_k_kl=2)
    metric.accumulate({"labels": LABELS[1:]}, {"logps": LOGPS[1:]}, old_logps=OLD[1:])
    metric.accumulate(INPUTS, OUTPUTS, old_logps=OLD)
    first, second = metric.calculate()["_high_kl_records"]
    assert (first["gsi"], first["pos"], first["token_id"]) == (1, 2, 2)
    assert (second["gsi"], second["pos"], second["token_id"]) == (1, 1, 1)
    assert first["kl"] == pytest.approx(math.exp(-1.0)) and first["ratio"] == pytest.approx(math.exp(-1.0))
    assert (first["logp_new"], first["logp_old"]) == pytest.approx((-2.0, -1.0))
    metric.accumulate(INPUTS, OUTPUTS)
    assert "_high_kl_records" not in metric.calculate()


def test_a_critic_is_judged_by_what_it_foresaw():
    metric = PPOValueMetric(epsilon=0.2)
    metric.accumulate(INPUTS, {"values": torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 9.0]])})
    assert metric.calculate() == {}
    metric.accumulate(
        INPUTS,
        {"values": torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 9.0]])},
        old_values=[[1.0, 1.0], [3.0]],
        returns=[[1.0, 3.0], [3.0]],
        advantages=[[1.0, -1.0], [0.0]],
    )
    results = metric.calculate()
    left = torch.tensor([0.0, 1.0, 0.0]).var(unbiased=False) / torch.tensor([1.0, 3.0, 3.0]).var(unbiased=False)
    assert results == pytest.approx(
        {
            "train/value_mean": 2.0,
            "train/return_mean": 7 / 3,
            "train/value_clip_ratio": 1 / 3,
            "train/explained_variance": 1 - float(left),
            "train/advantage_mean": 0.0,
            "train/advantage_std": math.sqrt(2 / 3),
        },
        rel=1e-5,
    )


def test_embeddings_are_near_their_positives_and_far_from_others():
    embeddings = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [0.6, 0.8], [1.0, 1.0]])
    labels = torch.tensor([[1], [0], [1], [0], [0]])
    metric = EmbeddingMetric()
    metric.accumulate({"labels": labels}, {"embeddings": embeddings, "loss": torch.tensor(0.5)}, grad_norm=2.0)
    assert metric.calculate() == {
        "pos_sim": "0.9000",
        "pos_sim_min": "0.8000",
        "pos_sim_max": "1.0000",
        "neg_sim": "0.3000",
        "loss": "0.5000",
        "grad_norm": "2.000000",
    }
    assert metric.calculate() == {}
    assert METRICS["EmbeddingMetric"] is EmbeddingMetric
