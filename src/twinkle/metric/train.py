"""How far and how fast training goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from twinkle.metric.base import Metric, Results


class TrainMetric(Metric):
    """``learning rate`` (of each parameter group), ``iters`` (optimizer steps), seconds passed, and steps a second."""

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: distributed.ProcessGroup | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock_s = clock_s
        self._start_s = self._last_s = clock_s()
        self._iters = self._last_iters = 0
        super().__init__(device_mesh, process_group)

    def reset(self) -> None:
        """Begin a new stretch of the speed; the count and the total time go on."""
        self._rates: list[float] = []
        self._last_s = self._clock_s()
        self._last_iters = self._iters

    def state(self) -> dict[str, Any]:
        """The clock of another process counts from elsewhere: how long ago counts."""
        now_s = self._clock_s()
        ago = {"_start_s": now_s - self._start_s, "_last_s": now_s - self._last_s}
        return {name: value for name, value in super().state().items() if name != "_clock_s"} | ago

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Take what ``state`` gave."""
        super().go_on_from(state)
        now_s = self._clock_s()
        self._start_s, self._last_s = now_s - self._start_s, now_s - self._last_s

    def accumulate(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, Any],
        *,
        lr: Sequence[float] = (),
        step: int = 0,
        gradient_accumulation_steps: int = 1,
        **kwargs: object,
    ) -> None:
        """Take the rates and the number of backward passes so far."""
        self._rates = list(lr)
        self._iters = step // gradient_accumulation_steps

    def calculate(self) -> Results:
        """The values of this rank: all ranks step together."""
        results: Results = {}
        for index, rate in enumerate(self._rates, start=1):
            key = "learning rate" if len(self._rates) == 1 else f"learning rate(param group {index})"
            results[key] = f"{rate:.6e}"
        now_s = self._clock_s()
        elapsed_s = now_s - self._last_s
        results["iters"] = self._iters
        results["total time elapse"] = f"{now_s - self._start_s:.0f} seconds"
        if elapsed_s > 0 and self._iters > self._last_iters:
            results["speed"] = f"{(self._iters - self._last_iters) / elapsed_s:.2f} iters/s"
        self.reset()
        return results
