"""What our own models offer to a training script, by adapter.

A batch is a list of rows (dicts with ``input_ids`` and shifted ``labels``), or conversations where a template is set.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.checkpoint_engine.ends import CheckpointSender
from twinkle.core.errors import InvalidInput
from twinkle.data_format.answers import MetricResults, ModelOutput
from twinkle.metric.records import EVAL, TRAIN
from twinkle.model.checkpoint import TrainingCheckpoints
from twinkle.model.forward_pass import ForwardPass, PassOptions
from twinkle.model.hub_calls import HubCalls
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.script_settings import ScriptSettings, rows_of
from twinkle.model.twinkle_model import Rows, TwinkleModel

__all__ = ["ComponentModel", "Rows"]


class ComponentModel(ScriptSettings, TrainingCheckpoints, HubCalls, CheckpointSender, TwinkleModel):
    """Base of models made of components.

    Every method takes ``adapter_name``; without it, the only adapter, else the group ``""``.

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

    # A step, piece by piece and in one call.

    def forward(
        self,
        *,
        inputs: Rows,
        adapter_name: str = "",
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Run rows through the model in training mode; ``loss_kwargs`` are kept for the loss."""
        group = self.group(adapter_name)
        options = PassOptions(temperature, return_logits, task, micro_batch_size, router_replay_action)
        return self._keep(group, self._forward(group, rows_of(group, inputs), options, loss_kwargs))

    def forward_only(
        self,
        *,
        inputs: Rows,
        adapter_name: str = "",
        disable_lora: bool = False,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Run rows in evaluation mode, without gradients; with ``disable_lora`` through the base model alone."""
        group = self.group(adapter_name)
        options = PassOptions(temperature, return_logits, task, micro_batch_size, router_replay_action)
        rows = rows_of(group, inputs)
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
        group.count_backward(last)

    def forward_backward(
        self,
        *,
        inputs: Rows,
        adapter_name: str = "",
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        gradient_accumulation_steps: int | None = None,
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Forward, loss and backward; ``loss_kwargs`` go to the loss."""
        group = self.group(adapter_name)
        if gradient_accumulation_steps is not None:
            group.set_accumulation(gradient_accumulation_steps)
        options = PassOptions(temperature, return_logits, task, micro_batch_size, router_replay_action)
        last = self._forward_backward(group, rows_of(group, inputs), options, loss_kwargs)
        group.count_backward(last)
        return self._keep(group, last)

    def _forward_backward(
        self, group: OptimizerGroup, rows: Rows, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> ForwardPass:
        last = self._forward(group, rows, options, loss_kwargs)
        last.calculate_loss(group.loss)
        self._backward(group, last)
        return last

    # Scripts that set the length of the window in forward_backward say it in each of these again.

    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str = "",
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """Divide the gradient by the window's count (of all ranks) and clip it; its norm before. None in a window."""
        return self._windowed(adapter_name, gradient_accumulation_steps).clip_grad_norm(max_grad_norm, norm_type)

    def step(
        self,
        optim_params: Mapping[str, Any] | None = None,
        *,
        adapter_name: str = "",
        gradient_accumulation_steps: int | None = None,
    ) -> None:
        """Step the optimizer; ``optim_params`` (lr, betas, eps, weight_decay) set it anew. No-op in a window."""
        group = self._windowed(adapter_name, gradient_accumulation_steps)
        if group.step(optim_params):
            self._publish(group)

    def zero_grad(self, *, adapter_name: str = "", gradient_accumulation_steps: int | None = None) -> None:
        """Clear the gradients. No-op in a window."""
        group = self._windowed(adapter_name, gradient_accumulation_steps)
        if group.is_window_full:
            self._clear_gradients(group)
            group.clear_window()

    def lr_step(self, *, adapter_name: str = "", gradient_accumulation_steps: int | None = None) -> None:
        """Move the learning rate's schedule on. No-op in a window."""
        self._windowed(adapter_name, gradient_accumulation_steps).lr_step()

    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str = "",
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """Clip, step, clear, and move the schedule on; the norm before clipping."""
        self._windowed(adapter_name, gradient_accumulation_steps)
        norm = self.clip_grad_norm(max_grad_norm, norm_type, adapter_name=adapter_name)
        self.step(adapter_name=adapter_name)
        self.zero_grad(adapter_name=adapter_name)
        self.lr_step(adapter_name=adapter_name)
        return norm

    def calculate_metric(self, is_training: bool = True, *, adapter_name: str = "") -> MetricResults:
        """The metrics since the last call, mostly as text."""
        group = self.group(adapter_name)
        group.show_metrics()
        results = MetricResults(group.metrics.calculate(is_training))
        recorded = {name: value for name, value in results.items() if not name.startswith("_")}
        if recorded:
            group.record(TRAIN if is_training else EVAL, recorded)
        return results

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

    def _windowed(self, adapter_name: str, gradient_accumulation_steps: int | None) -> OptimizerGroup:
        """The group of an adapter, its window as long as is said."""
        group = self.group(adapter_name)
        if gradient_accumulation_steps is not None:
            group.set_accumulation(gradient_accumulation_steps)
        return group

    @staticmethod
    def _keep(group: OptimizerGroup, last: ForwardPass) -> ModelOutput:
        group.show_metrics()
        group.last = last
        return last.output()
