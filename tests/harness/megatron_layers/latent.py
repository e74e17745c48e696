"""Multi-latent attention, with and without compressed queries, with plain and stretched positions."""

from typing import Any

import torch
import transformers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import distributed
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from harness.megatron_layers.ranks import HIDDEN, Found, Layout, Ranks, apart, config_of, drawn, gradient_of
from twinkle.model.megatron.modules.attention import PackedCoreAttention
from twinkle.model.megatron.modules.latent import LatentAttention, LatentSubmodules
from twinkle.model.megatron.modules.norm import RootMeanSquareNorm

HEADS = {"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 12}
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
PATHS = {
    "linear_q_proj": ("q_proj", 0),
    "linear_q_down_proj": ("q_a_proj", 0),
    "q_layernorm": ("q_a_layernorm", None),
    "linear_q_up_proj": ("q_b_proj", 0),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa", 0),
    "kv_layernorm": ("kv_a_layernorm", None),
    "linear_kv_up_proj": ("kv_b_proj", 0),
    "linear_proj": ("o_proj", 1),
}


def check_latent_attention(layout: Layout) -> Found:
    kinds = {"": (None, None), "compressed queries": (10, None), "stretched": (10, STRETCHED)}
    return {
        f"{name} {kind}": value
        for kind, (rank, rope) in kinds.items()
        for name, value in latent_attention(layout, rank, rope).items()
    }


def latent_attention(layout: Layout, q_lora_rank: int | None, rope: dict[str, Any] | None) -> Found:
    published = transformers.AutoConfig.for_model(
        "deepseek_v3",
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=HEADS["kv_lora_rank"],
        qk_nope_head_dim=HEADS["qk_head_dim"],
        qk_rope_head_dim=HEADS["qk_pos_emb_head_dim"],
        v_head_dim=HEADS["v_head_dim"],
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 10000.0, "original_max_position_embeddings": 32, **rope} if rope else None,
    )
    published._attn_implementation = "sdpa"
    plain, rotary = DeepseekV3Attention(published, 0), DeepseekV3RotaryEmbedding(published)
    for norm in (plain.q_a_layernorm, plain.kv_a_layernorm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    ranks = Ranks(layout)
    config = config_of(
        layout,
        MLATransformerConfig,
        multi_latent_attention=True,
        q_lora_rank=q_lora_rank,
        **HEADS,
        **_positions(rope),
    )
    parts = LatentSubmodules(ColumnParallelLinear, RowParallelLinear, PackedCoreAttention, RootMeanSquareNorm)
    layer = LatentAttention(config, parts, 1, AttnMaskType.causal, pg_collection=ranks.groups)

    def own(name: str, weight: torch.Tensor) -> torch.Tensor:
        axis = PATHS[name.rpartition(".")[0]][1]
        return weight if axis is None else ranks.shard(weight, axis=axis)

    def counterpart(name: str) -> torch.nn.Parameter:
        return plain.get_parameter(f"{PATHS[name.rpartition('.')[0]][0]}.weight")

    for name, parameter in layer.named_parameters():
        parameter.data.copy_(own(name, counterpart(name).data))
    hidden, slope = drawn(HIDDEN), drawn(HIDDEN)
    for tensor in hidden:
        tensor.requires_grad_()
    expected = torch.cat([plain(one[None], rotary(one, torch.arange(len(one))[None]), None)[0][0] for one in hidden])
    (expected * torch.cat(slope)).sum().backward()
    own_hidden = ranks.own([one.detach() for one in hidden]).requires_grad_()
    found, _ = layer(own_hidden[:, None], None, packed_seq_params=ranks.row.params())
    (found[:, 0] * ranks.own(slope)).sum().backward()
    result = {
        "output": apart(ranks.together(found[:, 0]), expected.detach()),
        "gradient of hidden": apart(
            ranks.together(gradient_of(own_hidden)), torch.cat([gradient_of(one) for one in hidden])
        ),
    }
    for name, parameter in layer.named_parameters():
        gradient = gradient_of(parameter)
        distributed.all_reduce(gradient, group=ranks.groups.cp)
        if ranks.is_sequence_parallel and getattr(parameter, "sequence_parallel", False):
            distributed.all_reduce(gradient, group=ranks.groups.tp)
        result[f"gradient of {name}"] = apart(gradient, own(name, gradient_of(counterpart(name))))
    return result


def _positions(rope: dict[str, Any] | None) -> dict[str, Any]:
    if rope is None:
        return {"rope_type": "rope", "rotary_base": 10000.0}
    return {
        "rope_type": "yarn",
        "rotary_base": 10000.0,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": 32,
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "mscale": rope["mscale"],
        "mscale_all_dim": rope["mscale_all_dim"],
    }
