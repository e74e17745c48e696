"""The metrics of one adapter, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import distributed

from twinkle.metric import LossMetric, Metric, TrainMetric
from twinkle.metric.base import Results
from twinkle.model.forward_pass import ForwardPass


class MetricBoard:
    """Shows each pass that has a loss to the metrics, once.

    A pass is shown when the next one comes or when the metrics are asked for: the norm of its gradient comes late.
    """

    def __init__(self, process_group: distributed.ProcessGroup | None) -> None:
        self.process_group = process_group
        self._metrics: list[tuple[Metric, bool | None]] = [
            (LossMetric(process_group=process_group), True),
            (TrainMetric(process_group=process_group), True),
            (LossMetric(process_group=process_group), False),
        ]
        self._shown: ForwardPass | None = None

    def add(self, metric: Metric, is_training: bool | None) -> None:
        """Show passes to ``metric`` too: training's, evaluation's, or with None both."""
        self._metrics.append((metric, is_training))

    def show(self, last: ForwardPass | None, **progress: Any) -> None:
        """Show a pass to the metrics unless they know it or it has no loss; ``progress`` goes with it."""
        if last is None or last is self._shown or last.loss is None:
            return
        self._shown = last
        outputs = {**last.outputs, "loss": last.loss.detach(), "num_tokens": last.num_tokens}
        if not last.is_training:
            progress.pop("grad_norm", None)
        for metric, is_training in self._metrics:
            if is_training in (None, last.is_training):
                metric.accumulate(last.inputs, outputs, **progress, **last.loss_kwargs)

    def states(self) -> list[Mapping[str, Any]]:
        """What each metric has accumulated, in their order."""
        return [metric.state() for metric, _ in self._metrics]

    def go_on_from(self, states: Sequence[Mapping[str, Any]], shown: ForwardPass | None) -> None:
        """Take what ``states`` gave; ``shown`` is the last pass if the metrics know it."""
        for (metric, _), state in zip(self._metrics, states, strict=True):
            metric.go_on_from(state)
        self._shown = shown

    def has_seen(self, last: ForwardPass | None) -> bool:
        """Whether a pass was shown already."""
        return last is not None and last is self._shown

    def calculate(self, is_training: bool) -> Results:
        """The values since the last call, of all metrics that see such passes."""
        results: Results = {}
        for metric, sees in self._metrics:
            if sees in (None, is_training):
                results.update(metric.calculate())
        return results
