"""A critic: a transformers model whose head says one number a position, what is to be expected from there on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import PPOValueLoss
from twinkle.model.forward_pass import CAUSAL, PassOptions
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.transformers_model import TransformersModel
from twinkle.model.transformers_pass import values_of
from twinkle.model.weight_files import read_tensors_of
from twinkle.processor import ModelBatch


class TransformersValueModel(TransformersModel):
    """A causal language model with a value head in place of its unembedding; passes give ``values`` (B, T).

    The head begins at 0, or with what a checkpoint of such a model holds. The model is trained whole, by
    ``PPOValueLoss`` unless another loss is set. The arguments are those of ``TransformersModel``.
    """

    def __init__(self, model_id: Any = None, *args: Any, **settings: Any) -> None:
        # A checkpoint of a critic has one row where the config promises a vocabulary.
        super().__init__(model_id, *args, **{"ignore_mismatched_sizes": True, **settings})
        unembedding = self.model.get_output_embeddings()
        head = torch.nn.Linear(
            unembedding.in_features, 1, device=unembedding.weight.device, dtype=unembedding.weight.dtype
        )
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        name = next(name for name, module in self.model.named_modules() if module is unembedding)
        self.model.set_output_embeddings(head)
        self.model.config.tie_word_embeddings = False
        self.model.all_tied_weights_keys = {}
        if Path(self.model_id).is_dir():
            stored = read_tensors_of(Path(self.model_id))
            if stored.keys() >= {f"{name}.weight", f"{name}.bias"} and len(stored[f"{name}.weight"]) == 1:
                head.load_state_dict({"weight": stored[f"{name}.weight"], "bias": stored[f"{name}.bias"]})
        self._add_group("", dict(self.model.named_parameters()))
        self.group("").loss = PPOValueLoss()

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1, is_trainable: bool = True
    ) -> None:
        """Refused: the head of a critic is new and its body is trained with it."""
        raise InvalidInput("adapter_name", "a critic is trained whole; leave out add_adapter_to_model")

    def _outputs(self, group: OptimizerGroup, batch: ModelBatch, options: PassOptions) -> dict[str, torch.Tensor]:
        if options.task != CAUSAL:
            raise InvalidInput("task", f"is {options.task!r}; a critic does {CAUSAL} only")
        if self._sequences is not None:
            raise InvalidInput("device_mesh", "shares sequences over ranks, which a critic does not; use dp and fsdp")
        return values_of(self.model, batch)
