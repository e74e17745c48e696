"""What a script sets for one adapter, and where its training stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.infra.device_mesh import current_rank
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.metric.forwarding import Forwarding
from twinkle.metric.records import STEP, Records
from twinkle.model.forward_pass import ForwardPass
from twinkle.model.metric_board import MetricBoard
from twinkle.model.parallel.gradient_sync import GradientSync
from twinkle.processor import InputProcessor

log = event_log()

POSITION = (
    "gradient_accumulation_steps",
    "cur_step",
    "num_tokens",
    "num_open",
    "grad_norm",
    "consumed_train_samples",
    "_window_loss",
    "_window_norm",
)
OPTIM_PARAMS = ("lr", "betas", "eps", "weight_decay")


@runtime_checkable
class Template(Protocol):
    """Turns a conversation into a row."""

    def encode(self, trajectory: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row of one trajectory."""
        ...


@runtime_checkable
class BatchTemplate(Template, Protocol):
    """Turns conversations into rows, of each none or several: it may drop or cut what is too long."""

    def batch_encode(self, trajectories: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows of all."""
        ...


class OptimizerGroup:
    """Loss, optimizer, schedule, processor and template of one adapter, and its accumulation window.

    A window is ``gradient_accumulation_steps`` backward passes: the optimizer steps when ``cur_step`` is a multiple of
    it; between, clipping, stepping and clearing do nothing. ``num_tokens`` is the sum of the losses' divisors in the
    window so far.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        sync: GradientSync,
        *,
        gradient_accumulation_steps: int = 1,
        keeps_records: bool = True,
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.loss: Loss = CrossEntropyLoss(reduction="sum")
        self.processor = InputProcessor()
        self.metrics = MetricBoard(sync.process_group)
        self.template: Template | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        self.scaler: torch.amp.GradScaler | None = None
        """Of a model that computes in float16; gradients are scaled until the window ends."""
        self.cur_step = 0
        self.num_tokens = 0
        self.num_open = 0
        """Backward passes whose gradients are still there."""
        self.grad_norm: float | None = None
        self.consumed_train_samples = 0
        self.last: ForwardPass | None = None
        self.records = Records()
        self.forwarding = Forwarding()
        self._window_loss = (0.0, 0)
        self._window_norm: float | None = None
        self._keeps_records = keeps_records
        self._sync = sync
        self._is_reduced = False
        self._is_unscaled = False
        self.set_accumulation(gradient_accumulation_steps)

    def set_accumulation(self, steps: int) -> None:
        """Change how many backward passes make a window."""
        if steps < 1:
            raise InvalidInput("gradient_accumulation_steps", f"is {steps}, must be at least 1")
        self.gradient_accumulation_steps = steps

    @property
    def is_window_full(self) -> bool:
        """Whether the optimizer steps now."""
        return self.cur_step % self.gradient_accumulation_steps == 0

    def require_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or ``InvalidInput`` that says how to set one."""
        if self.optimizer is None:
            raise InvalidInput("optimizer", f"adapter {self.name!r} has none; call set_optimizer first")
        return self.optimizer

    def require_last(self, what: str) -> ForwardPass:
        """The last pass, or ``InvalidInput`` that says what lacks it."""
        if self.last is None:
            raise InvalidInput("inputs", f"{what} needs a forward pass of adapter {self.name!r} before it")
        return self.last

    def count_backward(self, last: ForwardPass) -> None:
        """Note that one backward pass has added its gradients."""
        self.cur_step += 1
        self.num_open += 1
        self.num_tokens += last.num_tokens
        if last.loss is not None:
            total, count = self._window_loss
            self._window_loss = (total + float(last.loss.detach()), count + last.num_tokens)

    @torch.no_grad()
    def clip_grad_norm(self, max_grad_norm: float, norm_type: float) -> float | None:
        """Divide the gradients by the window's count over all ranks, then clip; the norm, or None within a window."""
        if not self.is_window_full:
            return None
        self._reduce()
        self._unscale()
        count = self._sync.sum_over_ranks(self.num_tokens)
        parameters = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        if count > 1:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.div_(count)
        self.num_tokens = 0
        self.grad_norm = self._window_norm = self._sync.clip(parameters, max_grad_norm, norm_type)
        return self.grad_norm

    def step(self, optim_params: Mapping[str, Any] | None = None) -> bool:
        """Step the optimizer at the end of a window; whether it did."""
        optimizer = self.require_optimizer()
        if not self.is_window_full:
            return False
        if optim_params:
            self._override(optimizer, optim_params)
        if self.num_open == 0:
            log.warning("model.step.no_gradients", adapter=self.name, next="nothing was changed; run a backward pass")
            return False
        self._reduce()
        self._unscale()
        if self.scaler is None:
            optimizer.step()
        else:
            # Leaves the parameters as they are if a gradient is not finite, and lowers the scale.
            self.scaler.step(optimizer)
            self.scaler.update()
            self._is_unscaled = False
        self._record_step()
        return True

    def lr_step(self) -> None:
        """Move the schedule on at the end of a window."""
        if self.is_window_full and self.scheduler is not None:
            self.scheduler.step()

    def clear_window(self) -> None:
        """Forget the counts; the owner clears the gradients themselves."""
        self.num_open = 0
        self.num_tokens = 0
        self._window_loss, self._window_norm = (0.0, 0), None
        self._is_reduced = False
        if self.scaler is not None and self._is_unscaled:
            # Clipped and then thrown away: the scale stays, and the next gradients are scaled again.
            self.scaler.update(self.scaler.get_scale())
        self._is_unscaled = False

    def _record_step(self) -> None:
        total, count = self._window_loss
        values: dict[str, float] = {"loss": total / max(1, count)}
        if self._window_norm is not None:
            values["grad_norm"] = self._window_norm
        values |= {
            "learning_rate" if index == 0 else f"learning_rate_{index}": rate
            for index, rate in enumerate(self.learning_rates())
        }
        self.record(STEP, values)
        self._window_loss, self._window_norm = (0.0, 0), None

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Keep a line of this training, and send it to where the script wants it seen. Of several ranks the first."""
        if self._keeps_records and current_rank() == 0:
            step = self.cur_step // self.gradient_accumulation_steps
            self.forwarding.send(self.records.add(kind, step, values))

    def gather_window(self) -> None:
        """Bring an open window of all ranks together on one, as it is stored and as it comes back."""
        if self.num_open and not self._is_reduced:
            self._sync.reduce(self.parameters.values())
            self.num_tokens = self._sync.sum_over_ranks(self.num_tokens)
            self.keep_window_once()

    def keep_window_once(self) -> None:
        """Leave a window that every rank has read whole on one of them."""
        self._sync.keep_once(self.parameters.values())
        self.num_tokens = self._sync.count_once(self.num_tokens)

    def show_metrics(self) -> None:
        """Show the last pass to the metrics, now that the norm of its gradient is known."""
        self.metrics.show(
            self.last,
            lr=self.learning_rates(),
            step=self.cur_step,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            grad_norm=self.grad_norm,
        )

    def position(self) -> dict[str, Any]:
        """Where the training stands, as data."""
        return {name: getattr(self, name) for name in POSITION}

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Take what ``position`` gave."""
        for name in POSITION:
            setattr(self, name, position[name])

    def learning_rates(self) -> list[float]:
        """The rate of each parameter group."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def _reduce(self) -> None:
        if not self._is_reduced:
            self._sync.reduce(self.parameters.values())
            self._is_reduced = True

    def _unscale(self) -> None:
        if self.scaler is not None and not self._is_unscaled:
            self.scaler.unscale_(self.require_optimizer())
            self._is_unscaled = True

    @staticmethod
    def _override(optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            if name not in OPTIM_PARAMS or name not in optimizer.defaults:
                known = ", ".join(param for param in OPTIM_PARAMS if param in optimizer.defaults)
                raise InvalidInput(f"optim_params.{name}", f"{type(optimizer).__name__} takes {known}")
            for group in optimizer.param_groups:
                group[name] = value
