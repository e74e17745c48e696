"""What every model offers to a training script, by adapter.

A batch is a list of rows (dicts with ``input_ids`` and shifted ``labels``), or conversations where a template is set.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import ModelOutput
from twinkle.loss import LOSSES, Loss
from twinkle.loss.base import PlainLoss
from twinkle.metric import METRICS, Metric
from twinkle.metric.base import Results
from twinkle.model.checkpoint import TrainingCheckpoints
from twinkle.model.forward_pass import ForwardPass, PassOptions
from twinkle.model.optimizer_group import OptimizerGroup, Template
from twinkle.model.optimizers import DEFAULT_LR, DEFAULT_WEIGHT_DECAY, OptimizerArg, create_optimizer
from twinkle.module.scheduler import SCHEDULERS
from twinkle.plugin.construct import construct_class
from twinkle.processor import InputProcessor

Rows = Sequence[Mapping[str, Any]] | Mapping[str, Any]

_LOSSES = {**{kind.__name__: kind for kind in LOSSES.values()}, **LOSSES}
PROCESSORS = {"InputProcessor": InputProcessor}


class TwinkleModel(TrainingCheckpoints):
    """Base of models. Every method takes ``adapter_name``; without it, the only adapter, else the group ``""``.

    Between two calls for one adapter, others may be called for another: adapters have nothing in common but the base
    model.
    """

    def __init__(self) -> None:
        self.optimizer_group: dict[str, OptimizerGroup] = {}

    # What a kind of model brings.

    @abstractmethod
    def _forward(
        self, group: OptimizerGroup, rows: Rows, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> ForwardPass:
        """A forward pass in training mode."""

    @abstractmethod
    def _forward_only(
        self,
        group: OptimizerGroup,
        rows: Rows,
        options: PassOptions,
        loss_kwargs: Mapping[str, Any],
        disable_lora: bool,
    ) -> ForwardPass:
        """A forward pass in evaluation mode, without a graph."""

    @abstractmethod
    def _backward(self, group: OptimizerGroup, last: ForwardPass) -> None:
        """Add the gradient of ``last.loss`` to the group's parameters."""

    @abstractmethod
    def _publish(self, group: OptimizerGroup) -> None:
        """Let changed parameters take part in the next pass."""

    @abstractmethod
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1, is_trainable: bool = True
    ) -> None:
        """Add an adapter by its PEFT config, or from a directory that holds one."""

    # What a script sets.

    def set_loss(
        self, loss_cls: str | Loss | type[Loss] | Callable[..., Any], *, adapter_name: str = "", **settings: Any
    ) -> None:
        """Set the loss: by class name or short name, class, object, or a function of inputs and outputs."""
        loss = construct_class("loss_cls", loss_cls, Loss, _LOSSES, wrap=PlainLoss, **settings)  # type: ignore[type-abstract]
        self._check_loss(loss)
        self.group(adapter_name).loss = loss

    def _check_loss(self, loss: Loss) -> None:
        """Raise ``InvalidInput`` for a loss this kind of model cannot feed."""

    def set_optimizer(
        self,
        optimizer_cls: OptimizerArg = "AdamW",
        *,
        lr: float = DEFAULT_LR,
        weight_decay: float = DEFAULT_WEIGHT_DECAY,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set the optimizer, one of ``torch.optim``. Decay is for matrices only; the schedule must be set again."""
        group = self.group(adapter_name)
        group.optimizer = create_optimizer(
            optimizer_cls, group.parameters, lr=lr, weight_decay=weight_decay, **settings
        )
        group.scheduler = None

    def set_lr_scheduler(
        self, scheduler_cls: str | LRScheduler | Callable[..., LRScheduler], *, adapter_name: str = "", **settings: Any
    ) -> None:
        """Set the schedule of the learning rate, ours or torch's; the optimizer must be set."""
        group = self.group(adapter_name)
        optimizer = group.require_optimizer()
        group.scheduler = construct_class(
            "scheduler_cls",
            scheduler_cls,
            LRScheduler,
            SCHEDULERS,
            optimizer,
            wrap=lambda factory: factory(optimizer, **settings),
            **settings,
        )

    def set_template(self, template: Template, *, adapter_name: str = "") -> None:
        """Set what turns conversations into rows: an object with ``encode``."""
        if isinstance(template, (str, type)) or not isinstance(template, Template):
            raise InvalidInput("template", f"is {template!r}; send an object with an encode method")
        self.group(adapter_name).template = template

    def set_processor(
        self,
        processor_cls: str | InputProcessor | type[InputProcessor] = "InputProcessor",
        *,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set what makes batches of rows."""
        processor = construct_class("processor_cls", processor_cls, InputProcessor, PROCESSORS, **settings)
        self.group(adapter_name).processor = processor

    def add_metric(
        self,
        metric_cls: str | Metric | type[Metric],
        is_training: bool | None = None,
        *,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Add a metric of training passes, of evaluation passes, or (None) one of each."""
        board = self.group(adapter_name).metrics
        if not isinstance(metric_cls, Metric):
            settings.setdefault("process_group", board.process_group)
        for kind in (True, False) if is_training is None and not isinstance(metric_cls, Metric) else (is_training,):
            metric = construct_class("metric_cls", metric_cls, Metric, METRICS, **settings)  # type: ignore[type-abstract]
            board.add(metric, kind)

    # A step, piece by piece and in one call.

    def forward(
        self,
        *,
        inputs: Rows,
        adapter_name: str = "",
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Run rows through the model in training mode; ``loss_kwargs`` are kept for the loss."""
        group = self.group(adapter_name)
        options = PassOptions(temperature, return_logits, task)
        return self._keep(group, self._forward(group, self._rows(group, inputs), options, loss_kwargs))

    def forward_only(
        self,
        *,
        inputs: Rows,
        adapter_name: str = "",
        disable_lora: bool = False,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Run rows in evaluation mode, without gradients; with ``disable_lora`` through the base model alone."""
        group = self.group(adapter_name)
        options = PassOptions(temperature, return_logits, task)
        rows = self._rows(group, inputs)
        return self._keep(group, self._forward_only(group, rows, options, loss_kwargs, disable_lora))

    def calculate_loss(self, *, adapter_name: str = "", **loss_kwargs: Any) -> float:
        """The loss of the last pass, in training or evaluation."""
        group = self.group(adapter_name)
        last = group.require_last("calculate_loss")
        last.loss_kwargs = {**last.loss_kwargs, **loss_kwargs}
        last.calculate_loss(group.loss)
        assert last.loss is not None
        return float(last.loss.detach())

    def backward(self, *, adapter_name: str = "") -> None:
        """Add the gradient of the last loss to the adapter's; one more backward pass of the window."""
        group = self.group(adapter_name)
        last = group.require_last("backward")
        if last.loss is None or not last.is_training:
            raise InvalidInput("inputs", "backward needs forward and calculate_loss before it")
        self._backward(group, last)
        group.count_backward(last.num_tokens)

    def forward_backward(
        self,
        *,
        inputs: Rows,
        adapter_name: str = "",
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        gradient_accumulation_steps: int | None = None,
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Forward, loss and backward; ``loss_kwargs`` go to the loss."""
        group = self.group(adapter_name)
        if gradient_accumulation_steps is not None:
            group.set_accumulation(gradient_accumulation_steps)
        options = PassOptions(temperature, return_logits, task)
        self._keep(group, self._forward(group, self._rows(group, inputs), options, loss_kwargs))
        self.calculate_loss(adapter_name=group.name)
        self.backward(adapter_name=group.name)
        return group.require_last("forward_backward").output()

    def clip_grad_norm(
        self, max_grad_norm: float = 1.0, norm_type: float = 2, *, adapter_name: str = ""
    ) -> float | None:
        """Divide the gradient by the window's count (of all ranks) and clip it; its norm before. None in a window."""
        return self.group(adapter_name).clip_grad_norm(max_grad_norm, norm_type)

    def step(self, optim_params: Mapping[str, Any] | None = None, *, adapter_name: str = "") -> None:
        """Step the optimizer; ``optim_params`` (lr, betas, eps, weight_decay) set it anew. No-op in a window."""
        group = self.group(adapter_name)
        if group.step(optim_params):
            self._publish(group)

    def zero_grad(self, *, adapter_name: str = "") -> None:
        """Clear the gradients. No-op in a window."""
        group = self.group(adapter_name)
        if group.is_window_full:
            self._clear_gradients(group)
            group.clear_window()

    def lr_step(self, *, adapter_name: str = "") -> None:
        """Move the learning rate's schedule on. No-op in a window."""
        self.group(adapter_name).lr_step()

    def clip_grad_and_step(
        self, max_grad_norm: float = 1.0, norm_type: float = 2, *, adapter_name: str = ""
    ) -> float | None:
        """Clip, step, clear, and move the schedule on; the norm before clipping."""
        norm = self.clip_grad_norm(max_grad_norm, norm_type, adapter_name=adapter_name)
        self.step(adapter_name=adapter_name)
        self.zero_grad(adapter_name=adapter_name)
        self.lr_step(adapter_name=adapter_name)
        return norm

    def calculate_metric(self, is_training: bool = True, *, adapter_name: str = "") -> Results:
        """The metrics since the last call, mostly as text."""
        group = self.group(adapter_name)
        group.show_metrics()
        return group.metrics.calculate(is_training)

    def get_train_configs(self, *, adapter_name: str = "") -> str:
        """What is set for an adapter, for people to read."""
        group = self.group(adapter_name)
        count = sum(parameter.numel() for parameter in group.parameters.values())
        optimizer = "none" if group.optimizer is None else type(group.optimizer).__name__
        scheduler = "none" if group.scheduler is None else type(group.scheduler).__name__
        rates = ", ".join(f"{rate:g}" for rate in group.learning_rates())
        return "\n".join(
            (
                f"adapter: {group.name or '(all parameters)'}, {count} trainable parameters",
                f"loss: {type(group.loss).__name__}",
                f"optimizer: {optimizer}, learning rate {rates or 'none'}",
                f"schedule: {scheduler}",
                f"gradient accumulation: {group.gradient_accumulation_steps} backward passes a step",
            )
        )

    def group(self, adapter_name: str) -> OptimizerGroup:
        """The group of an adapter; of an omitted name, the only adapter's, else the whole model's.

        Raises:
            InvalidInput: There is no such adapter, or several and none was named.
        """
        adapters = [name for name in self.optimizer_group if name]
        if not adapter_name and len(adapters) == 1:
            adapter_name = adapters[0]
        if adapter_name in self.optimizer_group and (adapter_name or not adapters):
            return self.optimizer_group[adapter_name]
        there = ", ".join(sorted(adapters)) or "none"
        problem = f"{adapter_name!r} is not known" if adapter_name else "is missing"
        raise InvalidInput("adapter_name", f"{problem}; add it with add_adapter_to_model, or name one of: {there}")

    @staticmethod
    def _rows(group: OptimizerGroup, inputs: Rows) -> list[Mapping[str, Any]]:
        rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        if all("input_ids" in row for row in rows):
            return rows
        if group.template is None:
            raise InvalidInput("inputs", "hold rows without input_ids; encode them, or call set_template")
        return [row if "input_ids" in row else group.template.encode(row) for row in rows]

    @staticmethod
    def _keep(group: OptimizerGroup, last: ForwardPass) -> ModelOutput:
        group.show_metrics()
        group.last = last
        return last.output()
