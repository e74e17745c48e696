"""DeepSeek-V4 over packed sequences: attention to the last tokens and to entries that each stand for many tokens.

A compressor makes one entry of every few tokens (4, in overlapping windows, or 128); queries see the entries of all
windows that have ended, or the best of them by an index (DeepSeek-V4, section 2.3). transformers' own forward keeps
running buffers for one sequence of a batch. Here a layer's whole past is what it keeps of each token, its record: from
it the entries of a sequence are computed anew, in training and in the sampler by the same function, so that nothing is
carried over between sequences and a prompt can be cut anywhere. The index only chooses: no gradient goes through it,
and it is not trained.

Shapes: T packed tokens, N queries, B those of a block, S tokens of a sequence so far, R features of a record, H heads,
D head size, W windows, M tokens of a window, C entries in sight, K keys, Q heads of the index, I their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4CSACompressor,
    DeepseekV4DecoderLayer,
    apply_rotary_pos_emb,
)

from twinkle.module.packed_attention import PackedAttention
from twinkle.module.scaled_attention import AttentionForm, attend

QUERIES_PER_BLOCK = 128


def prepare_deepseek_v4(model: torch.nn.Module) -> None:
    """Let the layers of DeepSeek-V4 in a model run on packed rows; of others, nothing is changed."""
    for module in model.modules():
        if isinstance(module, DeepseekV4Attention):
            setattr(module, "forward", _Attention(module))  # noqa: B010 - a method, to mypy
        elif isinstance(module, DeepseekV4DecoderLayer):
            setattr(module, "forward", _Layer(module))  # noqa: B010


class _Layer:
    """A decoder layer: residual streams are mixed before and after attention and experts.

    transformers' own, but for what the first routers go by: they get the tokens themselves from ``TokenInputs``. Sums
    over streams are written out, since a product over a few of them may round by how many tokens there are.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        *,
        token_ids: torch.Tensor | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        layer = self._layer
        post, comb, collapsed = layer.attn_hc(hidden_states)
        attended, _ = layer.self_attn(layer.input_layernorm(collapsed), **arguments)
        hidden_states = _mixed(hidden_states, attended, post, comb)
        post, comb, collapsed = layer.ffn_hc(hidden_states)
        made = layer.mlp(layer.post_attention_layernorm(collapsed), input_ids=token_ids)
        return _mixed(hidden_states, made, post, comb)


def _mixed(streams: torch.Tensor, made: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams [1, T, streams, hidden] after a block: what it made, and what each gets of each."""
    ins = streams.unbind(2)
    posts = post.to(streams.dtype).unbind(-1)
    shares = [row.unbind(-1) for row in comb.to(streams.dtype).unbind(-2)]
    outs = []
    for number, share in enumerate(posts):
        out = share[..., None] * made
        for row, stream in zip(shares, ins, strict=True):
            out = out + row[number][..., None] * stream
        outs.append(out)
    return torch.stack(outs, dim=2)


@dataclass(frozen=True, eq=False)
class _Query:
    """What the tokens of one sequence in a pass ask with: rotated queries [1, H, N, D], and for an index [N, Q, I]
    with the weight of each of its heads [N, Q].
    """

    heads: torch.Tensor
    index: torch.Tensor | None = None
    weights: torch.Tensor | None = None


class _Attention:
    """The forward of one attention layer on a packed row."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._compressor = module.compressor
        has_index = isinstance(module.compressor, DeepseekV4CSACompressor)
        self._indexer: Any = module.compressor.indexer if has_index else None

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        *,
        packed_attention: PackedAttention,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        module = self._module
        cos, sin = position_embeddings[module.rope_layer_type]
        residual = module.q_a_norm(module.q_a_proj(hidden_states))
        heads = module.q_b_norm(module.q_b_proj(residual).unflatten(-1, (-1, module.head_dim)))
        heads_1HTD = apply_rotary_pos_emb(heads.transpose(1, 2), cos, sin)
        key_TD = apply_rotary_pos_emb(module.kv_norm(module.kv_proj(hidden_states))[:, None], cos, sin)[0, 0]
        parts = [key_TD, *self._compressible(hidden_states)]
        records = packed_attention.records(module.layer_idx, torch.cat(parts, dim=-1))
        lengths = [record.num_new for record in records]
        queries = self._queries(heads_1HTD, hidden_states, residual, position_embeddings, lengths)
        sizes = [part.shape[-1] for part in parts]
        attended_1THD = torch.cat(
            [
                self._attend(query, record.start, record.rows.split(sizes, dim=-1))
                for query, record in zip(queries, records, strict=True)
            ],
            dim=1,
        )
        # Keys are the values too: what they were turned by is turned back.
        turned_1THD = apply_rotary_pos_emb(attended_1THD.transpose(1, 2), cos, -sin).transpose(1, 2)
        grouped = turned_1THD.reshape(*hidden_states.shape[:-1], module.config.o_groups, -1)
        return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None

    def _compressible(self, hidden_1TH: torch.Tensor) -> list[torch.Tensor]:
        """What entries are made of, those of the index too: values and gates of each token [T, ..]."""
        if self._compressor is None:
            return []
        made = [self._compressor.kv_proj(hidden_1TH)[0], self._compressor.gate_proj(hidden_1TH)[0]]
        if self._indexer is None:
            return made
        with torch.no_grad():
            return [*made, self._indexer.kv_proj(hidden_1TH)[0], self._indexer.gate_proj(hidden_1TH)[0]]

    def _queries(
        self,
        heads_1HTD: torch.Tensor,
        hidden_1TH: torch.Tensor,
        residual_1TR: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        lengths: Sequence[int],
    ) -> list[_Query]:
        split = heads_1HTD.split(lengths, dim=2)
        indexer = self._indexer
        if indexer is None:
            return [_Query(heads) for heads in split]
        with torch.no_grad():
            index = indexer.q_b_proj(residual_1TR).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
            index = apply_rotary_pos_emb(index, *position_embeddings[indexer.rope_layer_type])[0].transpose(0, 1)
            weights_TQ = indexer.scorer.weights_proj(hidden_1TH)[0].float() * indexer.scorer.weights_scaling
            parts = zip(split, index.split(lengths), weights_TQ.split(lengths), strict=True)
            return [_Query(*part) for part in parts]

    def _attend(self, query: _Query, start: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The attended values [1, N, H, D] of tokens ``start``.. of one sequence."""
        key_SD, *compressible = parts
        entries_WD = index_WI = None
        if self._compressor is not None:
            entries_WD = _entries(self._compressor, *compressible[:2], is_doubled=self._indexer is not None)
        if self._indexer is not None and len(key_SD) // self._compressor.compress_rate > self._indexer.index_topk:
            with torch.no_grad():
                index_WI = _entries(self._indexer, *compressible[2:], is_doubled=True)
        num_queries = query.heads.shape[2]
        attended = [
            self._attend_block(
                query, slice(first, min(first + QUERIES_PER_BLOCK, num_queries)), start, key_SD, entries_WD, index_WI
            )
            for first in range(0, num_queries, QUERIES_PER_BLOCK)
        ]
        return torch.cat(attended, dim=1) if len(attended) > 1 else attended[0]

    def _attend_block(
        self,
        query: _Query,
        block: slice,
        start: int,
        key_SD: torch.Tensor,
        entries_WD: torch.Tensor | None,
        index_WI: torch.Tensor | None,
    ) -> torch.Tensor:
        first, end = start + block.start, start + block.stop
        form = AttentionForm(self._module.scaling, window=self._module.sliding_window, sinks=self._module.sinks)
        first_key = form.first_key(first)
        keys_KD = key_SD[first_key:end]
        mask_BK = form.mask(first, end, first_key, keys_KD.device)
        if entries_WD is not None:
            rate = self._compressor.compress_rate
            ended_B = torch.arange(first + 1, end + 1, device=keys_KD.device) // rate
            num_entries = end // rate
            seen_BC = torch.arange(num_entries, device=keys_KD.device) < ended_B[:, None]
            if index_WI is not None and num_entries > self._indexer.index_topk:
                seen_BC = self._chosen(query, block, index_WI[:num_entries], seen_BC)
            keys_KD = torch.cat((keys_KD, entries_WD[:num_entries]))
            mask_BK = torch.cat((mask_BK, seen_BC), dim=1)
        keys = keys_KD[None, None]
        return attend(query.heads[:, :, block], keys, keys, form=form, mask=mask_BK)

    @torch.no_grad()
    def _chosen(self, query: _Query, block: slice, index_CI: torch.Tensor, seen_BC: torch.Tensor) -> torch.Tensor:
        """Which of the entries in sight of each query the index picks."""
        assert query.index is not None and query.weights is not None
        scores_BQC = functional.relu(query.index[block].float() @ index_CI.float().T)
        scores_BQC = scores_BQC * self._indexer.scorer.softmax_scale
        scores_BC = (scores_BQC * query.weights[block][..., None]).sum(dim=1).masked_fill(~seen_BC, -torch.inf)
        best = scores_BC.topk(self._indexer.index_topk, dim=-1).indices
        return torch.zeros_like(seen_BC).scatter_(1, best, True) & seen_BC


def _entries(part: Any, values_SF: torch.Tensor, gates_SF: torch.Tensor, *, is_doubled: bool) -> torch.Tensor:
    """One entry for each window of a sequence that has ended [W, D].

    An entry is the sum of its tokens' values by the softmax of their gates. With ``is_doubled`` a token has two of
    each: with the second it is in its own window's entry, with the first in that of the window after.
    """
    rate = part.compress_rate
    num_windows = len(values_SF) // rate
    if not num_windows:
        return values_SF.new_empty(0, part.head_dim)
    values_WMF, gates_WMF = (rows[: num_windows * rate].unflatten(0, (-1, rate)) for rows in (values_SF, gates_SF))
    gates_WMF = gates_WMF + part.position_bias
    if is_doubled:
        values_WMF = _with_window_before(values_WMF, part.head_dim, 0.0)
        gates_WMF = _with_window_before(gates_WMF, part.head_dim, -torch.inf)
    shares_WMD = gates_WMF.softmax(dim=1, dtype=torch.float32).to(values_WMF.dtype)
    made_WD = part.kv_norm((values_WMF * shares_WMD).sum(dim=1))
    positions = torch.arange(num_windows, device=made_WD.device) * rate
    turns = part.rotary_emb(made_WD[None], position_ids=positions[None], layer_type=part.rope_layer_type)
    entries: torch.Tensor = apply_rotary_pos_emb(made_WD[None, None], *turns)[0, 0]
    return entries


def _with_window_before(rows_WMF: torch.Tensor, size: int, nothing: float) -> torch.Tensor:
    """The first features of the window before, then the others of a window; ``nothing`` before the first."""
    before = torch.cat((torch.full_like(rows_WMF[:1, :, :size], nothing), rows_WMF[:-1, :, :size]))
    return torch.cat((before, rows_WMF[:, :, size:]), dim=1)
