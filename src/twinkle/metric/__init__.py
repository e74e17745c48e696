"""What a training loop reports between two steps."""

from twinkle.metric.accuracy import Accuracy
from twinkle.metric.base import Metric
from twinkle.metric.completion import CompletionRewardMetric
from twinkle.metric.loss import LossMetric
from twinkle.metric.preference import DPOMetric

__all__ = ["Accuracy", "CompletionRewardMetric", "DPOMetric", "LossMetric", "Metric"]
