"""What a training loop reports between two steps."""

from twinkle.metric.accuracy import Accuracy
from twinkle.metric.base import Metric
from twinkle.metric.completion import CompletionRewardMetric
from twinkle.metric.loss import LossMetric
from twinkle.metric.preference import DPOMetric
from twinkle.metric.registry import METRICS
from twinkle.metric.train import TrainMetric

__all__ = ["METRICS", "Accuracy", "CompletionRewardMetric", "DPOMetric", "LossMetric", "Metric", "TrainMetric"]
