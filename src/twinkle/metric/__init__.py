"""What a training loop reports between two steps."""

from twinkle.metric.accuracy import Accuracy
from twinkle.metric.base import Metric
from twinkle.metric.completion import CompletionRewardMetric
from twinkle.metric.embedding import EmbeddingMetric
from twinkle.metric.loss import LossMetric
from twinkle.metric.policy import CISPOMetric, GRPOMetric, GSPOMetric, PPOMetric
from twinkle.metric.preference import DPOMetric
from twinkle.metric.registry import METRICS
from twinkle.metric.train import TrainMetric
from twinkle.metric.value import PPOValueMetric

__all__ = [
    "METRICS",
    "Accuracy",
    "CISPOMetric",
    "CompletionRewardMetric",
    "DPOMetric",
    "EmbeddingMetric",
    "GRPOMetric",
    "GSPOMetric",
    "LossMetric",
    "Metric",
    "PPOMetric",
    "PPOValueMetric",
    "TrainMetric",
]
