"""Which models llama.cpp computes as transformers does, and how their tensors are to lie for it.

Few, and each compared with llama.cpp itself. What it computes otherwise is refused: it reads files with traits that it
does not know without a word, and computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twinkle.core.errors import ConfigError
from twinkle.workers.jobs.export.skeleton import Skeleton

_PLAIN_ROPE, _LLAMA3_ROPE = "default", "llama3"


@dataclass(frozen=True)
class Architecture:
    """One that llama.cpp knows.

    Args:
        arch: What the ``gguf`` package calls it.
        is_interleaved: Rotary positions turn neighbours instead of halves, so rows of queries and keys change places.
        ropes: Kinds of rotary embedding.
        fixed: Settings of the config that llama.cpp takes for granted.
    """

    arch: gguf.MODEL_ARCH
    is_interleaved: bool = False
    ropes: frozenset[str] = frozenset({_PLAIN_ROPE})
    fixed: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the file calls it."""
        return gguf.MODEL_ARCH_NAMES[self.arch]


_GATED = {"hidden_act": "silu"}
_NO_WINDOW = {"use_sliding_window": False}
_NO_BIAS = {"attention_bias": False}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        gguf.MODEL_ARCH.LLAMA,
        is_interleaved=True,
        ropes=frozenset({_PLAIN_ROPE, _LLAMA3_ROPE}),
        fixed={**_GATED, **_NO_BIAS, "mlp_bias": False},
    ),
    "qwen2": Architecture(gguf.MODEL_ARCH.QWEN2, fixed={**_GATED, **_NO_WINDOW}),
    "qwen3": Architecture(gguf.MODEL_ARCH.QWEN3, fixed={**_GATED, **_NO_WINDOW, **_NO_BIAS}),
    "qwen3_moe": Architecture(
        gguf.MODEL_ARCH.QWEN3MOE,
        fixed={
            **_GATED,
            **_NO_WINDOW,
            **_NO_BIAS,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
}
"""By the ``model_type`` of their configs."""


def find_architecture(skeleton: Skeleton) -> Architecture:
    """What a model is to llama.cpp.

    Raises:
        ConfigError: Nothing that this converter knows, by its name and with the reason.
    """
    config = skeleton.model.config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ConfigError(
            f"{skeleton.architecture} ({config.model_type}) is not converted to GGUF; what is: "
            f"{', '.join(sorted(ARCHITECTURES))}. Export it as peft or merged"
        )
    for name, value in architecture.fixed.items():
        found = getattr(config, name, value)
        if found != value and not (not found and not value):
            raise ConfigError(
                f"{skeleton.architecture}: {name} is {found!r}, and llama.cpp computes as if it were {value!r};"
                " export it as peft or merged"
            )
    rope = config.rope_parameters
    kind = rope.get("rope_type", _PLAIN_ROPE)
    if kind not in architecture.ropes or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{skeleton.architecture}: rotary positions of kind {kind!r} are not converted to GGUF; what is:"
            f" {', '.join(sorted(architecture.ropes))}. Export it as peft or merged"
        )
    return architecture


def rope_factors(config: Any) -> torch.Tensor | None:
    """By how much each rotary frequency is divided; None where none is."""
    if config.rope_parameters.get("rope_type", _PLAIN_ROPE) != _LLAMA3_ROPE:
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS[_LLAMA3_ROPE](config, torch.device("cpu"))
    head_dim = head_dim_of(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain: torch.Tensor = config.rope_parameters["rope_theta"] ** -exponents
    return (plain / scaled.double()).float()


def head_dim_of(config: Any) -> int:
    """How large a head of attention is."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def neighbours(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys, whose halves turn against each other, put so that neighbours do.

    Within a head of D rows, row i and row i + D/2 become rows 2i and 2i + 1.
    """
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).flatten(0, 2)


def row_order(architecture: Architecture, config: Any) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """What puts the rows of a tensor where llama.cpp has them, by the tensor's name in transformers."""

    def ordered(name: str, rows: torch.Tensor) -> torch.Tensor:
        if not architecture.is_interleaved:
            return rows
        if ".q_proj." in name:
            return neighbours(rows, config.num_attention_heads)
        if ".k_proj." in name:
            return neighbours(rows, config.num_key_value_heads)
        return rows

    return ordered
