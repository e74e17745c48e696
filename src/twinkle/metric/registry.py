"""Metrics by class name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from twinkle.metric.accuracy import Accuracy
from twinkle.metric.base import Metric
from twinkle.metric.completion import CompletionRewardMetric
from twinkle.metric.loss import LossMetric
from twinkle.metric.preference import DPOMetric
from twinkle.metric.train import TrainMetric

METRICS: Mapping[str, type[Metric]] = MappingProxyType(
    {kind.__name__: kind for kind in (Accuracy, CompletionRewardMetric, DPOMetric, LossMetric, TrainMetric)}
)
