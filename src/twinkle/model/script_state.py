"""All that a script has set for one adapter of a fused engine, and where it stands, as data and back.

Components are not stored: the calls that set them are, and are made again. What they hold beside their settings is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from twinkle.checkpoint_engine.packing import Packer, Unpacker
from twinkle.checkpoint_engine.snapshot import PackedScript
from twinkle.checkpoint_engine.training_state import load_scheduler, scheduler_files
from twinkle.core.file_names import SCHEDULER_FILE
from twinkle.metric.embedding import Similarities
from twinkle.metric.policy import PolicyTotals
from twinkle.model.forward_pass import ForwardPass
from twinkle.model.fused.embedding import EmbeddedRows, FusedEmbedding
from twinkle.model.fused.parameters import is_lent
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.pictures import Patches, Picture
from twinkle.module.lora import LoraAdapter

SETTINGS = ("set_processor", "set_template", "set_loss", "set_optimizer", "set_lr_scheduler")
"""In the order in which they are made again; of each the last one counts. Metrics add up."""
METRIC = "add_metric"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One call that set something, as it came: a method and JSON arguments."""

    method: str
    arguments: Mapping[str, Any]


@dataclass(eq=False, kw_only=True)
class Script:
    """One adapter on an engine, what a script has set for it, and the calls that did."""

    adapter: LoraAdapter
    group: OptimizerGroup
    settings: dict[str, Setting] = field(default_factory=dict)
    metrics: list[Setting] = field(default_factory=list)

    def note(self, setting: Setting) -> None:
        """A call has set something."""
        if setting.method == METRIC:
            self.metrics.append(setting)
            return
        self.settings[setting.method] = setting
        if setting.method == "set_optimizer":
            self.settings.pop("set_lr_scheduler", None)

    def pack(self) -> PackedScript:
        """Everything but the adapter's own buffers."""
        packer = Packer()
        group = self.group
        optimizer = group.optimizer
        own: dict[str, Any] = {}
        if optimizer is not None:
            for name, parameter in group.parameters.items():
                state = optimizer.state.get(parameter, {})
                own[name] = {key: value for key, value in state.items() if not is_lent(self.adapter, value)}
        last = group.last
        content = {
            "settings": [[each.method, dict(each.arguments)] for each in self.settings.values()],
            "metrics": [[each.method, dict(each.arguments)] for each in self.metrics],
            "position": group.position(),
            "optimizer": own,
            "rates": [] if optimizer is None else [_plain(each) for each in optimizer.param_groups],
            "scheduler": None if group.scheduler is None else scheduler_files(group.scheduler)[SCHEDULER_FILE],
            "accumulated": group.metrics.states(),
            "last": None if last is None else replace(last, parts=None),
            "has_parts": last is not None and last.parts is not None,
            "is_shown": group.metrics.has_seen(last),
        }
        return PackedScript(content=packer.pack(content), tensors=packer.tensors)

    def take(
        self, packed: PackedScript, make: Callable[[Setting], None], embedding: Callable[[], FusedEmbedding]
    ) -> None:
        """Stand where ``pack`` was called.

        Args:
            packed: What it gave.
            make: Makes a call on this script's group, as the client's was.
            embedding: What runs rows again whose embeddings were computed; asked for where there are any.
        """
        found = Unpacker(packed.tensors, ForwardPass, Picture, Patches, Similarities, PolicyTotals)
        content = found.unpack(packed.content)
        moments = [buffer.clone() for buffer in (self.adapter.exp_avg, self.adapter.exp_avg_sq)]
        settings = {method: arguments for method, arguments in content["settings"]}
        calls = [(method, settings[method]) for method in SETTINGS if method in settings]
        for method, arguments in [*calls, *content["metrics"]]:
            setting = Setting(method=method, arguments=arguments)
            make(setting)
            self.note(setting)
        # A fresh optimizer has emptied them.
        for buffer, values in zip((self.adapter.exp_avg, self.adapter.exp_avg_sq), moments, strict=True):
            buffer.copy_(values)
        self._restore_optimizer(content)
        self.group.go_on_from(content["position"])
        last = content["last"]
        if last is not None and content["has_parts"]:
            last.parts = EmbeddedRows(embedding(), self.adapter, last.tokens)
        self.group.last = last
        self.group.metrics.go_on_from(content["accumulated"], last if content["is_shown"] else None)

    def _restore_optimizer(self, content: Mapping[str, Any]) -> None:
        optimizer = self.group.optimizer
        if optimizer is None:
            return
        for group, rates in zip(optimizer.param_groups, content["rates"], strict=True):
            group.update(rates)
        for name, parameter in self.group.parameters.items():
            if content["optimizer"][name]:
                optimizer.state[parameter].update(content["optimizer"][name])
        if self.group.scheduler is not None:
            load_scheduler(self.group.scheduler, {SCHEDULER_FILE: content["scheduler"]})
            # Of a schedule that moves on before the optimizer of this process has stepped torch would warn.
            vars(optimizer)["_opt_called"] = True


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in group.items() if name != "params"}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
