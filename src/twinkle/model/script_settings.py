"""What a training script sets for an adapter before its loop."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from twinkle.core.errors import InvalidInput
from twinkle.infra.device_mesh import current_rank
from twinkle.infra.remote import remote_function
from twinkle.loss import LOSSES, InfonceLoss, Loss
from twinkle.loss.base import PlainLoss
from twinkle.metric import METRICS, Metric
from twinkle.metric.forwarders import Forwarder
from twinkle.model.optimizer_group import BatchTemplate, OptimizerGroup, Template
from twinkle.model.optimizers import DEFAULT_LR, DEFAULT_WEIGHT_DECAY, OptimizerArg, create_optimizer
from twinkle.module.scheduler import SCHEDULERS
from twinkle.plugin.construct import construct_class
from twinkle.plugin.registry import Registry
from twinkle.processor import InputProcessor

PROCESSORS = {"InputProcessor": InputProcessor}
TEMPLATES = Registry("twinkle.templates")

COMPARING = ("InfonceLoss", "infonce", InfonceLoss)
"""Losses that compare the rows of all ranks."""

_LOSSES = {**{kind.__name__: kind for kind in LOSSES.values()}, **LOSSES}


class ScriptSettings(ABC):
    """Every call takes ``adapter_name``; a component is given as an object, a class or a name."""

    model_id: str

    @abstractmethod
    def group(self, adapter_name: str) -> OptimizerGroup:
        """The group of an adapter."""

    @abstractmethod
    def _check_loss(self, loss: Loss) -> None:
        """Raise ``InvalidInput`` for a loss this kind of model cannot feed."""

    @abstractmethod
    def _embedding_tables(self, group: OptimizerGroup) -> frozenset[str]:
        """The names of the group's parameters whose rows are looked up or scored one by one."""

    def set_loss(
        self, loss_cls: str | Loss | type[Loss] | Callable[..., Any], *, adapter_name: str = "", **settings: Any
    ) -> None:
        """Set the loss: by class name or short name, class, object, or a function of inputs and outputs."""
        group = self.group(adapter_name)
        if loss_cls in COMPARING:
            settings.setdefault("process_group", group.metrics.process_group)
        loss = construct_class("loss_cls", loss_cls, Loss, _LOSSES, wrap=PlainLoss, **settings)  # type: ignore[type-abstract]
        self._check_loss(loss)
        group.loss = loss

    def set_optimizer(
        self,
        optimizer_cls: OptimizerArg = "AdamW",
        *,
        lr: float = DEFAULT_LR,
        weight_decay: float = DEFAULT_WEIGHT_DECAY,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set the optimizer, one of ``torch.optim`` by name or class, or one that is made already.

        Decay is for matrices only; the schedule must be set again.
        """
        group = self.group(adapter_name)
        group.optimizer = create_optimizer(
            optimizer_cls,
            group.parameters,
            lr=lr,
            weight_decay=weight_decay,
            tables=self._embedding_tables(group),
            **settings,
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

    def set_template(
        self,
        template_cls: str | Template | type[Template] | Callable[..., Template],
        *,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set what turns conversations into rows: by name, class, or an object with ``encode``.

        A class is built with ``settings``; its ``model_id`` is this model's unless they name another.
        """
        if isinstance(template_cls, (str, type)):
            settings.setdefault("model_id", self.model_id)
        group = self.group(adapter_name)
        group.template = construct_class("template_cls", template_cls, Template, TEMPLATES, **settings)  # type: ignore[type-abstract]

    def set_processor(
        self,
        processor_cls: str | InputProcessor | type[InputProcessor] | Callable[..., Any] = "InputProcessor",
        *,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set what makes batches of rows; a plain function makes other rows first (``InputProcessor.function``)."""

        def wrapped(function: Callable[..., Any]) -> InputProcessor:
            return InputProcessor(function=function, **settings)

        processor = construct_class(
            "processor_cls", processor_cls, InputProcessor, PROCESSORS, wrap=wrapped, **settings
        )
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
        if isinstance(metric_cls, Metric):
            board.add(metric_cls, is_training)
            return
        own = _accepted(metric_cls, {"device_mesh": None, "process_group": board.process_group})
        for kind in (True, False) if is_training is None else (is_training,):
            metric = construct_class("metric_cls", metric_cls, Metric, METRICS, **{**own, **settings})  # type: ignore[type-abstract]
            board.add(metric, kind)

    @remote_function(dispatch="all", collect="first")
    def report_to(self, *forwarders: str | Forwarder, adapter_name: str = "", **settings: Any) -> None:
        """Send each step's loss, rate and norm, and each report of metrics, to where people watch them.

        Args:
            forwarders: ``tensorboard``, ``wandb``, ``swanlab``, ``mlflow``, ``trackio``, or objects with ``log`` and
                ``close``. One that fails is told once and left out; training goes on.
            adapter_name: Whose.
            settings: Of those that are named: ``log_dir``, ``project``, ``tracking_uri``, ...
        """
        group = self.group(adapter_name)
        for forwarder in forwarders:
            if current_rank() == 0:
                group.forwarding.add(forwarder, settings)


def rows_of(group: OptimizerGroup, inputs: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Encoded rows: those that come without tokens go through the group's template, which may cut one into several.

    Raises:
        InvalidInput: There is no template, or it drops every row.
    """
    if not isinstance(inputs, Iterable):
        raise InvalidInput("inputs", f"is {inputs!r}; send a list of rows")
    rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if all("input_ids" in row for row in rows):
        return rows
    if group.template is None:
        raise InvalidInput("inputs", "hold rows without input_ids; encode them, or call set_template")
    if not isinstance(group.template, BatchTemplate):
        return [row if "input_ids" in row else group.template.encode(row) for row in rows]
    encoded: list[Mapping[str, Any]] = []
    for row in rows:
        encoded += [row] if "input_ids" in row else group.template.batch_encode([row])
    if not encoded:
        raise InvalidInput("inputs", f"are {len(rows)} conversations, all of which the template drops as too long")
    return encoded


def _accepted(metric_cls: str | type[Metric], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that the constructor takes: a script's own metric may take none."""
    kind = METRICS.get(metric_cls) if isinstance(metric_cls, str) else metric_cls
    if kind is None:
        return dict(settings)
    taken = inspect.signature(kind).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken):
        return dict(settings)
    names = {parameter.name for parameter in taken}
    return {name: value for name, value in settings.items() if name in names}
