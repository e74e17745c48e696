"""Calls of the Twinkle dialect on a run that trains the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twinkle.core.adapter import AdapterConfig
from twinkle.model.fused.core import LoraCore
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.script_state import Script
from twinkle.model.whole.core import WholeModelCore
from twinkle.model.whole.files import export_whole, import_whole
from twinkle.module.lora import LoraAdapter
from twinkle.module.whole import WHOLE
from twinkle.workers.scripts.scripts import Scripts


class WholeScripts(Scripts):
    """One copy of the model at a time; the base model alone is the model as it was loaded."""

    _why_no_patch = "would change the code of the model, which is this mesh's; run a model of your own for it"

    def __init__(self, core: LoraCore, *, folder: str, served_name: str) -> None:
        assert isinstance(core, WholeModelCore), "what trains a whole model"
        super().__init__(core, folder=folder, served_name=served_name)
        self._model_core = core
        self.base_adapter = core.pool.base

    def create(self, config: AdapterConfig) -> Script:
        """The model as it was loaded; nothing of it is drawn."""
        return self.dress(self.core.create_adapter(WHOLE), config.gradient_accumulation_steps)

    def files_of(self, adapter: LoraAdapter, *, with_optimizer: bool) -> dict[str, bytes]:
        """The files that transformers reads."""
        return export_whole(self._model_core, adapter, self.model_id, with_optimizer=with_optimizer)

    def adapter_of(self, files: Mapping[str, bytes], *, with_optimizer: bool, trainable: bool = True) -> LoraAdapter:
        """What such files hold."""
        return import_whole(self._model_core, files, with_optimizer=with_optimizer, trainable=trainable)

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        """Copies of the parameters, by transformers' names."""
        adapter = self._adapters[self.group(adapter_name).name]
        return {name: values.clone() for name, values in self._model_core.pool.layout.tensors(adapter.params).items()}

    def _take_weights(self, group: OptimizerGroup, files: Mapping[str, bytes], where: str) -> None:
        adapter = self._adapters[group.name]
        adapter.params.copy_(self.adapter_of(files, with_optimizer=False, trainable=False).params)
        adapter.publish()
