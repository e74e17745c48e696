"""What families of models are described by, and what several of them have: settings, layers, rules of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn import functional
from transformers import PretrainedConfig

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.modules.attention import PackedCoreAttention
from twinkle.model.megatron.modules.norm import RootMeanSquareNorm
from twinkle.model.megatron.weights.rules import Columns, GroupedHeads, Rows, Same, Vocabulary, WeightRule

LAYER = "decoder.layers.{layer}."
PUBLISHED_LAYER = "model.layers.{layer}."


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    Args:
        settings: Fields of Megatron's config from the model's.
        layer: The layer of a number, counted from 0 in the whole model.
        weights: The rules of all weights.
        fused_weights: The same where all experts of a layer are published as one tensor, if there are such.
        config_class: Of Megatron's configs.
    """

    settings: Callable[[PretrainedConfig], dict[str, Any]]
    layer: Callable[[TransformerConfig, PretrainedConfig, int], ModuleSpec]
    weights: Callable[[PretrainedConfig], Sequence[WeightRule]]
    fused_weights: Callable[[PretrainedConfig], Sequence[WeightRule]] | None = None
    config_class: type[TransformerConfig] = TransformerConfig

    def rules(self, config: PretrainedConfig, *, is_fused: bool) -> Sequence[WeightRule]:
        """Of all weights, in a checkpoint that has experts one by one or fused."""
        weights = self.fused_weights if is_fused and self.fused_weights is not None else self.weights
        return weights(config)


def dense_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Sizes and forms that all decoders share."""
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.to_dict().get("intermediate_size") or config.moe_intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_size(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "activation_func": functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": config.initializer_range,
    }


def head_size(config: PretrainedConfig) -> int:
    """Of queries and keys."""
    size = config.to_dict().get("head_dim")
    return int(size or config.hidden_size // config.num_attention_heads)


def attention_layer(*, mlp: Any, normalised_heads: bool) -> ModuleSpec:
    """A layer of grouped attention and something after it; with ``normalised_heads`` queries and keys have norms."""
    head_norm: Any = RootMeanSquareNorm if normalised_heads else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    return decoder_layer(attention, mlp)


def decoder_layer(attention: ModuleSpec, mlp: Any) -> ModuleSpec:
    """A layer with a norm before each of its two halves, each added to the stream."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RootMeanSquareNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RootMeanSquareNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def dense_mlp() -> ModuleSpec:
    """Gate and up in one product, and down."""
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


def decoder_rules(config: PretrainedConfig, *, prefix: str = "model.") -> list[WeightRule]:
    """Embedding, norms and head."""
    layer = f"{prefix}layers.{{layer}}."
    num_tokens = config.vocab_size
    embedding = f"{prefix}embed_tokens.weight"
    is_tied = bool(config.tie_word_embeddings)
    return [
        Vocabulary("embedding.word_embeddings.weight", (embedding,), num_tokens),
        Vocabulary("output_layer.weight", (embedding if is_tied else "lm_head.weight",), num_tokens, is_copy=is_tied),
        Same("decoder.final_layernorm.weight", (f"{prefix}norm.weight",)),
        Same(f"{LAYER}input_layernorm.weight", (f"{layer}input_layernorm.weight",)),
        Same(f"{LAYER}pre_mlp_layernorm.weight", (f"{layer}post_attention_layernorm.weight",)),
    ]


def attention_rules(config: PretrainedConfig, *, prefix: str = "model.") -> list[WeightRule]:
    """Of grouped attention, with biases and norms of heads where there are such."""
    ours, theirs = f"{LAYER}self_attention.", f"{prefix}layers.{{layer}}.self_attn."
    size = head_size(config)
    rows = (config.num_attention_heads // config.num_key_value_heads * size, size, size)
    return [
        *(
            GroupedHeads(f"{ours}linear_qkv.{kind}", tuple(f"{theirs}{part}_proj.{kind}" for part in "qkv"), rows)
            for kind in ("weight", "bias")
        ),
        Columns(f"{ours}linear_proj.weight", (f"{theirs}o_proj.weight",)),
        Same(f"{ours}q_layernorm.weight", (f"{theirs}q_norm.weight",)),
        Same(f"{ours}k_layernorm.weight", (f"{theirs}k_norm.weight",)),
    ]


def mlp_rules(*, ours: str = "mlp.", theirs: str = "mlp.", prefix: str = "model.") -> list[WeightRule]:
    """Of gate, up and down."""
    ours, theirs = f"{LAYER}{ours}", f"{prefix}layers.{{layer}}.{theirs}"
    return [
        Rows(f"{ours}linear_fc1.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")),
        Columns(f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",)),
    ]


def require_whole_attention(config: PretrainedConfig) -> None:
    """Raise ``ConfigError`` where tokens do not see all that is before them."""
    if config.to_dict().get("use_sliding_window"):
        raise ConfigError("model_id: its attention has a sliding window (use_sliding_window); use TransformersModel")
