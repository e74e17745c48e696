"""LoRA adapters of ``MegatronModel``: added by PEFT's config or from its files, trained and written one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch

from twinkle.checkpoint_engine.peft_tensors import published_key
from twinkle.core.errors import InvalidInput
from twinkle.model.checkpoint import find_checkpoint
from twinkle.model.loading import stored_paths
from twinkle.model.megatron.gradients import MegatronRanks
from twinkle.model.megatron.lora.adapter import MegatronAdapter, MegatronAdapters
from twinkle.model.megatron.masters import Masters
from twinkle.model.megatron.passes import MegatronPasses
from twinkle.model.megatron.weights.convert import fill, published
from twinkle.model.megatron.weights.rules import WeightTable
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.peft_config import ALL_LINEAR
from twinkle.model.weight_files import ADAPTER_WEIGHTS, save_adapter


class AdaptedModel(MegatronPasses):
    """What adapters add to a model whose base is there already."""

    model_id: str
    config: Any
    _table: WeightTable
    _weights: dict[str, torch.nn.Parameter]
    _masters: Masters
    _sync: MegatronRanks
    _default_modules: Any = ALL_LINEAR

    def __init__(self) -> None:
        super().__init__()
        self._adapted: MegatronAdapters | None = None
        self._adapters: dict[str, MegatronAdapter] = {}

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1, is_trainable: bool = True
    ) -> None:
        """Add an adapter by its ``peft.LoraConfig``, or from a directory; the first one freezes the base model.

        Every rank must add it. Experts have none, as PEFT leaves what is no Linear.

        Raises:
            InvalidInput: The name is taken or empty, or the config asks for what is not computed.
        """
        if not adapter_name or adapter_name in self._adapters:
            raise InvalidInput(
                "adapter_name", f"{adapter_name!r} is {'taken' if adapter_name else 'empty'}; send another"
            )
        is_folder = isinstance(config_or_dir, (str, Path))
        folder = find_checkpoint(config_or_dir, field="config_or_dir") if is_folder else None
        adapters = self.adapters()
        try:
            config = config_or_dir if folder is None else peft.PeftConfig.from_pretrained(str(folder))
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise InvalidInput("config_or_dir", f"PEFT cannot read adapter {adapter_name!r}: {error}") from error
        adapter = adapters.create(config, self._default_modules)
        self._admit(adapter)
        if folder is not None:
            self._fill(adapter, folder)
        if not is_trainable:
            for parameter in adapter.parameters.values():
                parameter.requires_grad_(False)
        self._freeze()
        self._sync.note(adapter.parameters, adapter.spreads)
        self._sync.share(adapter.parameters.values())
        self._adapters[adapter_name] = adapter
        self.optimizer_group[adapter_name] = OptimizerGroup(
            adapter_name, adapter.parameters, self._sync, gradient_accumulation_steps=gradient_accumulation_steps
        )

    def _admit(self, adapter: MegatronAdapter) -> None:
        """Refuse an adapter that there is no room for."""

    def adapters(self) -> MegatronAdapters:
        """Where adapters can be on the model's layers; all ranks must ask together the first time."""
        if self._adapted is None:
            self._adapted = MegatronAdapters(
                self.pipeline.stages,
                self._table,
                self.layout,
                is_sequence_parallel=self.config.sequence_parallel,
            )
        return self._adapted

    def _freeze(self) -> None:
        """Train adapters from now on, and nothing else."""
        for weight in self._weights.values():
            weight.requires_grad_(False)
            weight.grad = None
        self._masters = Masters({})
        self.optimizer_group.pop("", None)

    @contextmanager
    def _activate(self, group: OptimizerGroup, *, with_adapter: bool) -> Iterator[None]:
        if self._adapted is None or not group.name:
            yield
            return
        with self._adapted.active(self._adapters[group.name] if with_adapter else None):
            yield

    def _rules(self, group: OptimizerGroup) -> WeightTable:
        """Of what a group trains."""
        return self._adapted.table if self._adapted is not None and group.name else self._table

    def _adapter_state(self, group: OptimizerGroup) -> dict[str, torch.Tensor]:
        return dict(published(self._adapters[group.name].parameters, self._rules(group), self.layout))

    def _write_adapter(self, group: OptimizerGroup, folder: Path, *, is_writer: bool) -> None:
        state = self._adapter_state(group)
        if is_writer:
            save_adapter(folder, state, self.get_peft_config_dict(adapter_name=group.name))

    def _fill(self, adapter: MegatronAdapter, folder: Path) -> None:
        path = folder / ADAPTER_WEIGHTS
        try:
            stored = safetensors.torch.load_file(path)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise InvalidInput(path.name, f"cannot be read from {folder}: {error}") from error
        paths = stored_paths(self.model_id)
        tensors = {published_key(name, paths): tensor for name, tensor in stored.items()}
        assert self._adapted is not None, "adapters are made of it"

        def lookup(name: str) -> torch.Tensor:
            if name not in tensors:
                raise InvalidInput(path.name, f"lacks {name}; it was saved from another model or adapter")
            return tensors[name]

        fill(adapter.parameters, self._adapted.table, lookup, self.layout)

    def get_peft_config_dict(self, *, adapter_name: str = "") -> dict[str, Any]:
        """The adapter's config as PEFT writes it; empty where all parameters are trained."""
        group = self.group(adapter_name)
        return self._adapters[group.name].settings(self.model_id) if group.name else {}

    def _merging(self, group: OptimizerGroup, *, merge: bool) -> Any:
        if self._adapted is None or not group.name or not merge:
            return None
        return self._adapted.merging(self._adapters[group.name])
