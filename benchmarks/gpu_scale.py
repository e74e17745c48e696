"""How much of everything a run on a GPU measures, in full and in short."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_sides import Load


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of everything."""

    config: dict[str, int]
    fusion: tuple[Load, ...]
    step: tuple[Load, ...]
    rounds: int
    new_tokens: int
    ranks: tuple[int, ...]


FULL = Scale(
    config={
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    # What tells most comes first: the time may not reach the last.
    fusion=tuple(
        Load(tenants=count, tokens=tokens)
        for count, tokens in ((16, 32), (16, 512), (4, 512), (1, 32), (4, 32), (16, 128), (4, 128), (1, 512))
    ),
    step=(Load(tenants=8, tokens=128), Load(tenants=8, tokens=1024)),
    rounds=3,
    new_tokens=32,
    ranks=(8, 64),
)
SHORT = Scale(
    config={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
    },
    fusion=(Load(tenants=1, tokens=32), Load(tenants=4, tokens=32)),
    step=(Load(tenants=2, tokens=32),),
    rounds=2,
    new_tokens=4,
    ranks=(8,),
)


LARGER = {
    "4b": {
        **FULL.config,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    }
}
