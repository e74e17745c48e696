"""The frozen weights of a base model by the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from twinkle.core.errors import InvalidInput
from twinkle.model.loading import A_LEVEL_DEEPER
from twinkle.module.experts import LoraExperts


class BaseWeights:
    """Those of one model, in their place, this engine's layers in it or not."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def by_name(self) -> dict[str, torch.Tensor]:
        """All of them."""
        wrapped = {
            f"{name}.base.": f"{name}." for name, part in self._model.named_modules() if isinstance(part, LoraExperts)
        }
        weights: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters():
            inside = next((prefix for prefix in wrapped if name.startswith(prefix)), "")
            weights[wrapped.get(inside, "") + name.removeprefix(inside)] = parameter
        return weights

    def language_names(self, decoder: torch.nn.Module) -> list[str]:
        """The names of those that text goes through, of those that have values of their own."""
        inside = {id(parameter) for parameter in decoder.parameters()}
        inside.add(id(self._model.get_output_embeddings().weight))
        return [name for name, weight in self.by_name().items() if id(weight) in inside and name not in self._tied]

    def own_name(self, name: str) -> str:
        """What a weight is called here that a class for text alone, or one for pictures too, calls ``name``."""
        own = self.by_name()
        published = A_LEVEL_DEEPER
        inner = published.loaded + name.removeprefix(published.published)
        found = (each for each in (name, published.stored(name), inner) if each in own)
        return next(found, name)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights over these.

        Raises:
            InvalidInput: A name or a shape is not this model's; weights before it are copied already.
        """
        own = self.by_name()
        for given, tensor in weights:
            name = self.own_name(given)
            if name not in own:
                # Tied to a weight that has a name of its own.
                if name in self._tied:
                    continue
                raise InvalidInput("weights", f"hold {given}, which {type(self._model).__name__} does not have")
            if own[name].shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, here {tuple(own[name].shape)}"
                raise InvalidInput("weights", f"{name} has shape {shapes}")
            own[name].copy_(tensor)

    @property
    def _tied(self) -> dict[str, str]:
        tied: dict[str, str] = getattr(self._model, "all_tied_weights_keys", {})
        return tied
