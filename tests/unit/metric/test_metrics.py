"""Metrics as a training loop uses them: several batches, one result, a fresh start."""

import statistics

import pytest
import torch
from torch import distributed

from twinkle.core.errors import InvalidInput
from twinkle.metric import Accuracy, CompletionRewardMetric, DPOMetric, LossMetric

LABELS = torch.tensor([[-100, 1, 2], [-100, 0, -100]])


def test_the_loss_is_a_mean_over_tokens_and_starts_again():
    metric = LossMetric()
    metric.accumulate({}, {"loss": torch.tensor(12.0), "num_tokens": 3}, grad_norm=0.5, advantages=[1])
    metric.accumulate({}, {"loss": 8.0, "num_tokens": 1})
    assert metric.calculate() == {"loss": "5.0000", "grad_norm": "0.500000"}
    metric.accumulate({}, {"loss": 2.0})
    metric.accumulate({}, {"loss": 4.0}, grad_norm=0.0)
    assert metric.calculate() == {"loss": "3.0000"}
    assert metric.calculate() == {}


def test_accuracy_counts_trained_positions_only():
    metric = Accuracy()
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 1, 0], [2, 0, 2]]), 3).float()
    metric.accumulate({"labels": LABELS}, {"logits": logits})
    assert metric.calculate() == {"accuracy": "0.6667", "correct_tokens": 2, "total_tokens": 3}
    assert metric.calculate() == {"accuracy": "0.0000", "correct_tokens": 0, "total_tokens": 0}
    with pytest.raises(InvalidInput, match="return_logits"):
        metric.accumulate({"labels": LABELS}, {})


def test_a_round_of_sampling_is_summed_up_in_numbers():
    metric = CompletionRewardMetric()
    metric.accumulate(rewards={"format": [1.0, 0.0]}, completion_lengths=[4, 8], generate_time=2.0)
    metric.accumulate(rewards={"format": [1.0], "math": [0.5]}, completion_lengths=[6], generate_time=4.0)
    assert metric.calculate() == {
        "train/format_reward": pytest.approx(2 / 3),
        "train/format_reward_std": pytest.approx(statistics.stdev([1, 0, 1])),
        "train/math_reward": 0.5,
        "train/math_reward_std": 0.0,
        "train/completion_length": 6.0,
        "profiling/Time taken: generate": 3.0,
    }
    assert metric.calculate() == {}


def test_pairs_are_compared_by_what_they_gained_over_the_reference():
    metric = DPOMetric(beta=0.5)
    logps = torch.tensor([[9.0, -1.0, -2.0], [9.0, -4.0, 9.0]])
    metric.accumulate({"labels": LABELS}, {"logps": logps}, ref_outputs={"logps": torch.full((2, 3), -2.0)})
    assert metric.calculate() == {
        "logps/chosen": "-3.0000",
        "logps/rejected": "-4.0000",
        "logps/ref_chosen": "-4.0000",
        "logps/ref_rejected": "-2.0000",
        "rewards/chosen": "0.5000",
        "rewards/rejected": "-1.0000",
        "rewards/margins": "1.5000",
        "rewards/accuracies": "1.0000",
    }
    metric.accumulate({"labels": LABELS}, {"logps": logps})
    assert metric.calculate() == {"logps/chosen": "-3.0000", "logps/rejected": "-4.0000"}


def test_parts_of_all_ranks_are_gathered(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        metric = LossMetric(process_group=distributed.group.WORLD)
        metric.accumulate({}, {"loss": 2.0, "num_tokens": 4})
        assert metric.calculate() == {"loss": "0.5000"}
    finally:
        distributed.destroy_process_group()
