"""Metrics by class name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from twinkle.metric.accuracy import Accuracy
from twinkle.metric.base import Metric
from twinkle.metric.completion import CompletionRewardMetric
from twinkle.metric.embedding import EmbeddingMetric
from twinkle.metric.loss import LossMetric
from twinkle.metric.policy import CISPOMetric, GRPOMetric, GSPOMetric, PPOMetric
from twinkle.metric.preference import DPOMetric
from twinkle.metric.train import TrainMetric
from twinkle.metric.value import PPOValueMetric

_KINDS: tuple[type[Metric], ...] = (
    Accuracy,
    CISPOMetric,
    CompletionRewardMetric,
    DPOMetric,
    EmbeddingMetric,
    GRPOMetric,
    GSPOMetric,
    LossMetric,
    PPOMetric,
    PPOValueMetric,
    TrainMetric,
)
METRICS: Mapping[str, type[Metric]] = MappingProxyType({kind.__name__: kind for kind in _KINDS})
