"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, and V3) under Megatron, over packed rows.

Megatron's own cannot be built without Transformer Engine, and without sequence parallelism it loses the gradient that
the other tensor ranks' heads have for the shared part of the keys. Parameters have its names and its layout.

Shapes: N tokens of this rank, H heads of this rank, D head size of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import (
    RotaryEmbedding,
    YarnRotaryEmbedding,
    _yarn_get_mscale,
    apply_rotary_pos_emb,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.modules.packed import bounds_of

NORM_EPSILON = 1e-6
"""Of the norms within a layer, whatever the others have: theirs is not in the published configs."""
Part: TypeAlias = ModuleSpec | type


@dataclass
class LatentSubmodules:
    """The parts of a layer; the norms are those of compressed queries, keys and values."""

    column: Part
    row: Part
    core_attention: Part
    norm: Part


class LatentAttention(MegatronModule):
    """One layer of multi-latent attention.

    Args:
        config: Says the sizes of heads and of what is compressed; without ``q_lora_rank`` queries are not.
        submodules: Its parts.
        layer_number: Counted from one.
        attn_mask_type: Ignored: all served families attend causally.
        cp_comm_type: Ignored: keys and values are gathered.
        pg_collection: The groups of this model.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.config: MLATransformerConfig
        self.layer_number = layer_number
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self._tensor_group: Any = groups.tp
        self._context_group: Any = groups.cp
        self._head_size = config.qk_head_dim + config.qk_pos_emb_head_dim
        heads = config.num_attention_heads
        self._num_heads = heads // groups.tp.size()

        def column(inputs: int, outputs: int, name: str) -> Any:
            return self._linear(submodules.column, inputs, outputs, name, gather_output=False, skip_bias_add=False)

        if config.q_lora_rank is None:
            self.linear_q_proj = column(config.hidden_size, heads * self._head_size, "q_proj")
        else:
            self.linear_q_down_proj = column(config.hidden_size, config.q_lora_rank, "q_down_proj")
            self.q_layernorm = self._norm(submodules.norm, config.q_lora_rank)
            self.linear_q_up_proj = column(config.q_lora_rank, heads * self._head_size, "q_up_proj")
        compressed = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = column(config.hidden_size, compressed, "kv_down_proj")
        self.kv_layernorm = self._norm(submodules.norm, config.kv_lora_rank)
        expanded = heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = column(config.kv_lora_rank, expanded, "kv_up_proj")
        self.linear_proj = self._linear(
            submodules.row,
            heads * config.v_head_dim,
            config.hidden_size,
            "proj",
            input_is_parallel=True,
            skip_bias_add=True,
        )
        scale = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
        is_stretched = config.rope_type == "yarn"
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=(scale * scale if is_stretched else 1.0) * self._head_size**-0.5,
            k_channels=self._head_size,
            v_channels=config.v_head_dim,
            pg_collection=groups,
        )
        self.rotary_pos_emb = _rotary(config, self._context_group)
        self._recomputes_core = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or ()
        )

    def _linear(self, kind: Part, inputs: int, outputs: int, name: str, **settings: bool) -> Any:
        return build_module(
            kind,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=self._tensor_group,
            **settings,
        )

    def _norm(self, kind: Part, size: int) -> Any:
        return build_module(kind, hidden_size=size, config=self.config, eps=NORM_EPSILON)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the tokens of each packed sequence [N, 1, ..]; Megatron's pair of output and bias."""
        if packed_seq_params is None:
            raise ConfigError("packed_seq_params: latent attention takes packed rows only; see PackedRow")
        heads = self._queries_keys_values(hidden_states, packed_seq_params)

        def attend(*matrices: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = self.core_attention(*matrices, None, packed_seq_params=packed_seq_params)
            return attended

        if self._recomputes_core and self.training:
            attended_NHV = tensor_parallel.checkpoint(attend, False, *heads)
        else:
            attended_NHV = attend(*heads)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.linear_proj(attended_NHV.flatten(1)[:, None])
        return output

    def _queries_keys_values(
        self, hidden_states: torch.Tensor, params: PackedSeqParams
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        if config.q_lora_rank is None:
            queries, _ = self.linear_q_proj(hidden_states)
        else:
            compressed = self._whole(self.linear_q_down_proj(hidden_states)[0])
            queries, _ = self.linear_q_up_proj(self.q_layernorm(self._split_again(compressed)))
        query_NHD = queries[:, 0].unflatten(-1, (self._num_heads, self._head_size))
        compressed = self._whole(self.linear_kv_down_proj(hidden_states)[0])
        latent, shared = compressed.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(self._split_again(latent)))
        sizes = [config.qk_head_dim, config.v_head_dim]
        key_NHD, value_NHV = expanded[:, 0].unflatten(-1, (self._num_heads, -1)).split(sizes, dim=-1)
        # All heads of all tensor ranks have this part of the keys, so it has all their gradients.
        shared_N1D = copy_to_tensor_model_parallel_region(shared, group=self._tensor_group)
        sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        plain_NHD, turned_NHD = query_NHD.split(sizes, dim=-1)
        turned_NHD, shared_N1D = self._turned(turned_NHD, params), self._turned(shared_N1D, params)
        query_NHD = torch.cat((plain_NHD, turned_NHD), dim=-1)
        key_NHD = torch.cat((key_NHD, shared_N1D.expand(-1, self._num_heads, -1)), dim=-1)
        return query_NHD, key_NHD, value_NHV

    def _whole(self, compressed: torch.Tensor) -> torch.Tensor:
        """What the tensor ranks have of a compressed vector, together."""
        whole: torch.Tensor = gather_from_tensor_model_parallel_region(compressed, group=self._tensor_group)
        return whole

    def _split_again(self, compressed: torch.Tensor) -> torch.Tensor:
        """The tokens that this rank has between layers with sequence parallelism: norms and products want these."""
        if not self.config.sequence_parallel:
            return compressed
        own: torch.Tensor = scatter_to_sequence_parallel_region(compressed, group=self._tensor_group)
        return own

    def _turned(self, matrix_NHD: torch.Tensor, params: PackedSeqParams) -> torch.Tensor:
        """Rotated by positions that begin anew with every sequence."""
        bounds = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
        longest = max(end - start for start, end in pairwise(bounds_of(params)))
        # Not by calling it, which keeps every layer alive in a cache of its own.
        found = self.rotary_pos_emb.get_emb(longest)
        frequencies, scale = found if isinstance(found, tuple) else (found, 1.0)
        turned: torch.Tensor = apply_rotary_pos_emb(
            matrix_NHD,
            frequencies,
            config=self.config,
            cu_seqlens=bounds,
            mscale=scale,
            cp_group=self._context_group,
        )
        return turned


class _StretchedRotary(YarnRotaryEmbedding):
    def _set_cos_sin_cache(self, *args: Any, **settings: Any) -> None:
        """Keep nothing: it would be what a context rank has of one sequence, and rows are packed."""


def _rotary(config: MLATransformerConfig, context_group: Any) -> RotaryEmbedding | YarnRotaryEmbedding:
    if config.rope_type == "rope":
        return RotaryEmbedding(
            config.qk_pos_emb_head_dim,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=context_group,
        )
    return _StretchedRotary(
        config.qk_pos_emb_head_dim,
        rotary_base=config.rotary_base,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=context_group,
    )
