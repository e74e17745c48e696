"""What a round of sampling brought: rewards, lengths, time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twinkle.metric.base import Metric, Results

GENERATE = "profiling/Time taken: generate"
WEIGHT_SYNC = "profiling/Time taken: move_model_to_sampler"


class CompletionRewardMetric(Metric):
    """Mean and sample deviation of each reward, mean completion length, mean seconds of sampling and weight sync.

    Used on its own: ``accumulate(rewards={"accuracy": [...]}, completion_lengths=[...])``.
    """

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[tuple[str, list[float]]] = []

    def accumulate(
        self,
        inputs: Mapping[str, torch.Tensor] | None = None,
        outputs: Mapping[str, Any] | None = None,
        *,
        rewards: Mapping[str, Sequence[float]] | None = None,
        completion_lengths: Sequence[int] = (),
        generate_time: float | None = None,
        weight_sync_time: float | None = None,
        **kwargs: object,
    ) -> None:
        """Take one round in; times are in seconds."""
        for name, values in (rewards or {}).items():
            self._parts.append((f"train/{name}_reward", [float(value) for value in values]))
        self._parts.append(("train/completion_length", [float(length) for length in completion_lengths]))
        for key, seconds in ((GENERATE, generate_time), (WEIGHT_SYNC, weight_sync_time)):
            if seconds is not None:
                self._parts.append((key, [seconds]))

    def calculate(self) -> Results:
        """The numbers, of what came at least once."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for key, values in self.gather_results(self._parts):
            found[key] += values
        self.reset()
        results: Results = {}
        for key, values in found.items():
            if values:
                results[key] = statistics.fmean(values)
                if key.endswith("_reward"):
                    results[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        return results
