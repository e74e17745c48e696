"""Answers that scripts of both generations read: by key and by attribute, plain or under ``result``."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, Self


class Dumped(ABC):
    """Gives its fields as a pydantic model does, for scripts that log or keep answers whole: upstream's are such."""

    __slots__ = ()

    @abstractmethod
    def model_dump(self) -> dict[str, Any]:
        """The fields, by name."""

    def model_dump_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.model_dump())


class Answer(dict[str, Any], Dumped):
    """A dict whose entries are attributes too; ``result`` is the answer itself, for scripts that expect a holder."""

    @property
    def result(self) -> Self:
        """The entries."""
        return self

    def model_dump(self) -> dict[str, Any]:
        """``{"result": the entries}``."""
        return {"result": dict(self)}

    def __getattr__(self, name: str) -> Any:
        """The entry of that name; entries named like a method of dict are there by key only."""
        try:
            return self[name]
        except KeyError:
            there = ", ".join(self) or "nothing"
            raise AttributeError(f"there is no {name!r}; there is {there}") from None


class ModelOutput(Answer):
    """What a pass over a batch of rows gave.

    ``logps`` (B, T) are the logprobs of ``labels``; where these are ignored, the logprob of token 0 stands. ``logits``
    is None unless asked for. ``topk_logps``, ``entropies``, ``embeddings``, ``values`` and ``routed_experts`` are there
    where the loss or the task wants them. ``loss`` is a float once it has been calculated; ``num_tokens`` is the
    divisor of its gradient.
    """


class MetricResults(Answer):
    """The metrics since they were last asked for, mostly as text."""


class SavedCheckpoint(str):
    """The directory of a checkpoint, as text."""

    __slots__ = ()

    @property
    def checkpoint_dir(self) -> str:
        """The directory."""
        return str(self)

    @property
    def twinkle_path(self) -> str:
        """What ``load`` and a sampler's ``adapter_path`` take: the directory."""
        return str(self)
