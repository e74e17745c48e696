"""A base model without its weights: which class reads it, and what its tensors are called in its files.

Shapes: E experts, O outputs, I inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from twinkle.core.errors import ConfigError
from twinkle.hub.support import TOWER_LEFT_OUT, WITH_PICTURES, architecture_of, check_config, quantisation_of
from twinkle.hub.trust import naming_code
from twinkle.model.loading import FOREIGN, WHOLE_BELOW, decoder_of
from twinkle.module.targets import Target, find_targets
from twinkle.workers.jobs.export.tensor_files import check_weight_files

CONFIG_FILE = "config.json"
TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Skeleton:
    """The published class of a base model on torch's ``meta`` device.

    Args:
        model: Without weights, as transformers would load it.
        written: Its ``config.json``.
        targets: What adapters train in it.
        missing: Parameters that the files do not hold.
    """

    model: Any
    written: Mapping[str, Any]
    targets: tuple[Target, ...]
    missing: frozenset[str]

    @property
    def architecture(self) -> str:
        """What the model calls itself."""
        return architecture_of(self.written)

    @property
    def head(self) -> str:
        """The name of the output head's weight, as the class has it."""
        return f"{next(target.path for target in self.targets if target.kind == 'unembed')}.weight"

    @property
    def embedding(self) -> str:
        """The name of the input embedding, as the class has it."""
        embedding = self.model.get_input_embeddings()
        return f"{next(name for name, module in self.model.named_modules() if module is embedding)}.weight"

    @property
    def is_tied(self) -> bool:
        """Whether one matrix is both."""
        return bool(self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight)

    def stored(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a parameter becomes in the files: under the names there, cut and turned as they have it."""
        converted: dict[str, torch.Tensor] = revert_weight_conversion(self.model, {name: tensor})
        return converted


def open_skeleton(folder: Path) -> Skeleton:
    """Find the class of a base model's folder.

    Raises:
        ConfigError: It cannot be merged; by its name, with the reason.
    """
    written = json.loads((folder / CONFIG_FILE).read_text())
    name = architecture_of(written)
    check_config(name, written)
    if written.get("model_type") in FOREIGN:
        raise ConfigError(
            f"{name} ({written['model_type']}) exists as code of its own only, whose names of weights are not those"
            " that adapters are made for; export the adapter alone, as peft"
        )
    quantisation = (quantisation_of(written) or {}).get("quant_method")
    if quantisation:
        raise ConfigError(
            f"{name} is stored in {quantisation}: an update cannot be added to such numbers without losing most of it;"
            " export the adapter alone, as peft"
        )
    check_weight_files(folder)
    loader = class_for(written)
    with naming_code(name):
        model, info = loader.from_pretrained(
            folder,
            device_map="meta",
            local_files_only=True,
            output_loading_info=True,
            dtype=torch.float32,
            trust_remote_code=False,
        )
    targets = find_targets(model, model.get_output_embeddings(), _decoder(model))
    return Skeleton(model, written, targets, frozenset(info["missing_keys"]))


def class_for(written: Mapping[str, Any]) -> Any:
    """What of transformers loads the published class of a config."""
    if written.get("model_type") in WITH_PICTURES | TOWER_LEFT_OUT:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _decoder(model: Any) -> Any:
    """The part that adapters train, where there is a tower beside it."""
    if model.config.model_type in WHOLE_BELOW:
        return model.language_model
    if model.config.model_type in WITH_PICTURES | TOWER_LEFT_OUT:
        return model.base_model.language_model
    return decoder_of(model)
