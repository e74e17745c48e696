"""What a base model is and what it can take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelInfo:
    """What a base model is and what it can take."""

    name: str
    architecture: str
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    max_rank: int


def model_info(model: Any, *, name: str, max_rank: int) -> ModelInfo:
    """That of a model of transformers."""
    return ModelInfo(
        name=name,
        architecture=type(model).__name__,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_context_length=model.config.get_text_config().max_position_embeddings,
        eos_token_ids=_eos_token_ids(model),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        max_rank=max_rank,
    )


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id
    if configured is None:
        configured = getattr(model.config.get_text_config(), "eos_token_id", None)
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, Iterable) else (configured,)
