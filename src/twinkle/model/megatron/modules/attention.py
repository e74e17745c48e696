"""Attention over packed rows, alone or with context parallelism, as the core of Megatron's attention layers.

Megatron's own takes one length for all sequences, and leaves context parallelism to Transformer Engine. Here each
sequence is attended for itself; with context parallelism keys and values of all ranks are gathered and put in order,
and the two blocks of queries that a rank has look at what is before them. The gather's backward pass adds up what the
ranks found for each key.

Shapes: N tokens of this rank, T of the whole row, B of a batch that is not packed, S its length, H query heads, G
key/value heads, D head size of queries and keys, V of values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.modules.packed import Bounds, bounds_of, gathered_order
from twinkle.module.packed_attention import CausalSpans
from twinkle.module.scaled_attention import AttentionForm, attend


class PackedCoreAttention(MegatronModule):
    """Causal attention within each packed sequence.

    Args:
        config: Of the model.
        layer_number: Counted from one.
        attn_mask_type: Ignored: all served families attend causally.
        attention_type: ``self``.
        softmax_scale: Of the products of queries and keys; by default that of the head size.
        cp_comm_type: Ignored: keys and values are gathered.
        pg_collection: The groups of this model.
        k_channels: Of queries and keys, where not ``kv_channels``.
        v_channels: Of values, where not ``kv_channels``.

    Raises:
        ConfigError: The config asks for what is not computed here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        _require_plain(config, attention_dropout)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.layer_number = layer_number
        self.context_group: Any = groups.cp
        size = k_channels or config.kv_channels
        assert size is not None, "the config fills it in"
        self.form = AttentionForm(size**-0.5 if softmax_scale is None else softmax_scale)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """The attended values: [N, H, V] for a packed row [N, H, D], [S, B, H * V] for a batch [S, B, H, D]."""
        if packed_seq_params is not None:
            return self._attend(query, key, value, bounds_of(packed_seq_params))
        length, batch = query.shape[:2]
        whole = length * self.context_group.size()
        bounds = tuple(range(0, whole * batch + 1, whole))
        query, key, value = (matrix.transpose(0, 1).flatten(0, 1) for matrix in (query, key, value))
        attended = self._attend(query, key, value, bounds)
        return attended.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)

    def _attend(
        self, query_NHD: torch.Tensor, key_NGD: torch.Tensor, value_NGV: torch.Tensor, bounds: Bounds
    ) -> torch.Tensor:
        # Values may be narrower than keys (latent attention); the fast kernels want one size.
        size = value_NGV.shape[-1]
        value_NGD = functional.pad(value_NGV, (0, query_NHD.shape[-1] - size))
        if self.context_group.size() == 1:
            spans = CausalSpans(list(pairwise(bounds)))
            attended = spans(self.layer_number, *map(_heads_first, (query_NHD, key_NGD, value_NGD)), form=self.form)
        else:
            attended = self._attend_blocks(query_NHD, key_NGD, value_NGD, bounds)
        return attended[0, ..., :size]

    def _attend_blocks(
        self, query_NHD: torch.Tensor, key_NGD: torch.Tensor, value_NGD: torch.Tensor, bounds: Bounds
    ) -> torch.Tensor:
        """Let the two blocks of queries that this rank has of each sequence look at what is before them."""
        group = self.context_group
        size, rank = group.size(), group.rank()
        order_T = gathered_order(bounds, size).to(key_NGD.device)
        both = torch.cat((key_NGD, value_NGD), dim=-1)
        both_TG2D = gather_from_sequence_parallel_region(both, group=group).index_select(0, order_T)
        lengths = [end - start for start, end in pairwise(bounds)]
        queries = query_NHD.split([length // size for length in lengths])
        attended: list[torch.Tensor] = []
        for query, both_of, length in zip(queries, both_TG2D.split(lengths), lengths, strict=True):
            block = length // (2 * size)
            key, value = both_of.chunk(2, dim=-1)
            for number, block_of in zip((rank, 2 * size - 1 - rank), query.split(block), strict=True):
                start, end = number * block, (number + 1) * block
                mask = self.form.mask(start, end, 0, query.device)
                heads = map(_heads_first, (block_of, key[:end], value[:end]))
                attended.append(attend(*heads, form=self.form, mask=mask))
        return torch.cat(attended, dim=1)


def _heads_first(matrix_NHD: torch.Tensor) -> torch.Tensor:
    return matrix_NHD.transpose(0, 1)[None]


def _require_plain(config: TransformerConfig, attention_dropout: float | None) -> None:
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    if dropout:
        raise ConfigError(f"attention_dropout: is {dropout}; attention over packed rows has none, set it to 0")
    if config.window_size is not None:
        raise ConfigError(f"window_size: is {config.window_size}; leave it out, attention here sees all that is before")
    if config.softmax_type != "vanilla":
        raise ConfigError(f"softmax_type: is {config.softmax_type!r}; only 'vanilla' is computed here")
    if config.apply_query_key_layer_scaling:
        raise ConfigError("apply_query_key_layer_scaling: is not computed here; leave it out")
