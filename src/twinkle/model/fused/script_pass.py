"""A pass of a script through the fused engine, from its opened rows to what the adapter remembers of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twinkle.model.forward_pass import ForwardPass
from twinkle.model.fused.batch_jobs import Work, require_finite
from twinkle.model.fused.rows import entropy_weights_of, job_of, linear_weights, scoring_job, set_outputs, weights_of
from twinkle.model.fused.training import TrainJob, TrainOutcome
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.module.lora import LoraAdapter

Aim = Literal["score", "train", "gradient"]
"""Its outputs; outputs, loss and gradient; or the gradient alone, of a pass that has outputs and loss already."""


@dataclass(eq=False)
class ScriptPass:
    """One pass of one adapter, which shares device passes with others: all with ``FusedLoraModel.forward_backward``.

    A loss whose gradient does not depend on the outputs takes one of them, any other two.
    """

    group: OptimizerGroup
    adapter: LoraAdapter
    opened: ForwardPass
    aim: Aim

    def work(self) -> Work:
        """What goes through the model."""
        if self.aim == "score":
            return scoring_job(self.opened, self.adapter, self.group.loss)
        if self.aim == "gradient":
            return self._carrier()
        if self.group.loss.is_linear:
            return job_of(self.opened, self.adapter, linear_weights(self.opened, self.group.loss))
        return self

    def scoring(self) -> TrainJob:
        """The job that finds the outputs of a loss that needs them for its gradient."""
        return scoring_job(self.opened, self.adapter, self.group.loss)

    def carrier_of(self, scores: TrainOutcome) -> TrainJob:
        """The job that has the loss's gradient, now that the outputs are known."""
        set_outputs(self.opened, scores)
        self.opened.calculate_loss(self.group.loss)
        return self._carrier()

    def take(self, outcome: TrainOutcome) -> None:
        """Keep what came of it: for what is called next, and for the metrics."""
        if not self.opened.outputs:
            set_outputs(self.opened, outcome)
        if self.aim == "train" and self.opened.loss is None:
            self.opened.calculate_loss(self.group.loss)
            self.opened.settle_loss()
        keep(self.group, self.opened, counts=self.aim != "score")

    def _carrier(self) -> TrainJob:
        weights = weights_of(self.opened)
        assert self.opened.loss is not None, "a gradient is one of a loss"
        entropy_weights = entropy_weights_of(self.opened)
        all_weights = (*weights, *entropy_weights)
        require_finite(type(self.group.loss).__name__, float(self.opened.loss), all_weights)
        return job_of(self.opened, self.adapter, weights, entropy_weights)


def keep(group: OptimizerGroup, opened: ForwardPass, *, counts: bool) -> None:
    """Let a pass be the adapter's last; with ``counts`` it has added its gradient to the window."""
    if opened is not group.last:
        group.show_metrics()
        group.last = opened
    if counts:
        group.count_backward(opened)
