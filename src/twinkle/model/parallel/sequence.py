"""Sequences that ranks share: each has a stretch of every one, and in attention some of the heads of all of it.

Around attention the ranks exchange stretches of all heads for whole sequences of some heads, and back (DeepSpeed
Ulysses, arXiv 2309.14509). What is no attention but mixes positions too, a linear-attention layer, gets the whole
sequence on every rank, and keeps its stretch of the result. All the rest of a model works position by position.

What a loss sees is whole: the ranks of a sequence gather their logprobs and calculate the same loss, of which each one
differentiates its own stretch. So the sum of gradients over all ranks is the gradient, and counts are taken over the
ranks that have different rows.

Shapes: B rows, T positions (U stretches of S), H heads (U parts of N), D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from transformers import AttentionInterface

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.infra import DeviceMesh
from twinkle.infra.process_group import group_of_ranks
from twinkle.loss import Loss
from twinkle.model.forward_pass import EMBEDDING, PassOptions, entropies, label_logps
from twinkle.processor import ModelBatch
from twinkle.processor.input_processor import IGNORED_LABEL

ATTENTION = "twinkle_ulysses"
LAYOUT = "sequence_layout"
"""The keyword by which a pass's layout reaches its attention layers, also when these are computed again."""
LINEAR_ATTENTION = "linear_attn"
"""What transformers calls the modules of layers whose attention is a recurrence."""
NOT_SHARED = ("position_bias", "sinks")
"""Keywords of kinds of attention that are not computed here."""


@dataclass(eq=False)
class SequenceLayout:
    """How the sequences of one batch lie over the ranks.

    Args:
        group: The ranks, in the order of their stretches.
        positions: Of every token (B, T), whole; -1 for padding.
        is_packed: Whether sequences stand one after the other in a row.
    """

    group: distributed.ProcessGroup
    size: int
    rank: int
    positions: torch.Tensor
    is_packed: bool
    pads_left: bool
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def stretch(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of values by position (B, T, ...)."""
        return values.chunk(self.size, dim=1)[self.rank]

    def kept_BT(self) -> torch.Tensor | None:
        """Which positions hold tokens, None where all do."""
        kept_BT = self.positions >= 0
        return None if bool(kept_BT.all()) else kept_BT

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Which positions each one attends to (B, 1, T, T); None where these are just all before it."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        num_positions = self.positions.shape[1]
        if not self.is_packed and not self.pads_left and (window is None or window >= num_positions):
            return None  # padding stands after the tokens, which do not look ahead
        index_T = torch.arange(num_positions, device=self.positions.device)
        distance_TT = index_T[:, None] - index_T[None, :]
        sees_TT = distance_TT >= 0
        if window is not None:
            sees_TT &= distance_TT < window
        sequence_BT = (self.positions == 0).cumsum(1) if self.is_packed else torch.zeros_like(self.positions)
        sees_BTT = sees_TT & (sequence_BT[:, :, None] == sequence_BT[:, None, :])
        sees_BTT = sees_BTT & (self.positions >= 0)[:, None, :]
        # Of a row of padding something must be seen, or its softmax is no number.
        return (sees_BTT | (distance_TT == 0))[:, None]

    def to_heads(self, values_BHSD: torch.Tensor) -> torch.Tensor:
        """A stretch of all heads for all positions of some: (B, N, T, D)."""
        parts = values_BHSD.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        exchanged_UBNSD: torch.Tensor = _Exchange.apply(parts, self.group)
        return exchanged_UBNSD.movedim(0, 2).flatten(2, 3)

    def to_stretch(self, values_BNTD: torch.Tensor) -> torch.Tensor:
        """The way back: (B, H, S, D)."""
        parts = values_BNTD.unflatten(2, (self.size, -1)).movedim(2, 0).contiguous()
        exchanged_UBNSD: torch.Tensor = _Exchange.apply(parts, self.group)
        return exchanged_UBNSD.movedim(0, 1).flatten(1, 2)

    def gather(self, values_BS: torch.Tensor, *, sums: bool) -> torch.Tensor:
        """The stretches of all ranks as one (B, T, ...).

        Args:
            values_BS: This rank's.
            sums: Whether the ranks go on differently, so that their gradients add up; else all do the same.
        """
        whole: torch.Tensor = _Gather.apply(values_BS.contiguous(), self.group, self.size, self.rank, sums)
        return whole


@dataclass(frozen=True, eq=False)
class Stretch:
    """One rank's part of a batch: what its model gets, what its logprobs are of, and the way to what a loss sees."""

    inputs: dict[str, Any]
    labels: torch.Tensor | None
    layout: SequenceLayout
    batch: ModelBatch

    def laid_out(self, values_BS: torch.Tensor) -> torch.Tensor:
        """Values by position of all ranks, in the layout of the batch."""
        return self.layout.gather(values_BS, sums=False)[:, : self.batch.model_inputs["input_ids"].shape[1]]

    def whole(self, values_BS: torch.Tensor) -> torch.Tensor:
        """The same, one row for each sequence."""
        return self.batch.unpack(self.laid_out(values_BS))


class SequenceParallel:
    """Splits the passes of one model over the ranks that share its sequences. All of them make the same calls."""

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        self.size = mesh.ulysses_world_size
        self._rank = mesh.ulysses_rank
        self._group = group_of_ranks([mesh.sequence_ranks(rank) for rank in range(mesh.world_size)])
        heads = model.config.get_text_config().num_attention_heads
        if heads % self.size:
            raise ConfigError(
                f"ulysses_size: {self.size} ranks cannot share the {heads} attention heads of {type(model).__name__};"
                " choose a divisor"
            )
        self._has_linear_attention = _wrap_linear_attention(model)
        AttentionInterface.register(ATTENTION, _attend)
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            raise ConfigError(
                f"ulysses_size: the attention of {type(model).__name__} cannot be replaced; set ulysses_size to 1"
            )

    def outputs_of(self, model: Any, batch: ModelBatch, loss: Loss, options: PassOptions) -> dict[str, torch.Tensor]:
        """The outputs that the task and the loss want, whole on every rank of the sequence."""
        part = self.split(batch)
        if options.task == EMBEDDING:
            result = model(**part.inputs, use_cache=False, output_hidden_states=True, logits_to_keep=1)
            return {"embeddings": batch.last_positions(part.laid_out(result.hidden_states[-1]))}
        logits_BSV = model(**part.inputs, use_cache=False).logits
        if options.temperature != 1.0:
            logits_BSV = logits_BSV / options.temperature
        outputs: dict[str, torch.Tensor] = {}
        if part.labels is not None:
            outputs["logps"] = part.whole(label_logps(logits_BSV, part.labels))
        if options.return_logits or loss.require_logits:
            outputs["logits"] = part.whole(logits_BSV)
        if loss.require_entropy:
            outputs["entropies"] = part.whole(entropies(logits_BSV))
        return outputs

    def split(self, batch: ModelBatch) -> Stretch:
        """This rank's part of a batch that all ranks of the sequence have."""
        if batch.is_packed and self._has_linear_attention:
            raise InvalidInput(
                "padding_free", "cannot be shared by ranks (ulysses_size) where layers have linear attention; pad rows"
            )
        inputs = batch.model_inputs
        unknown = sorted(inputs.keys() - {"input_ids", "position_ids", "attention_mask"})
        if unknown:
            raise InvalidInput(unknown[0], "cannot be shared by ranks (ulysses_size); set ulysses_size to 1")
        if inputs["position_ids"].dim() != 2:
            raise InvalidInput("position_ids", "of pictures cannot be shared by ranks (ulysses_size); send text alone")
        num_positions = inputs["input_ids"].shape[1]
        padding = -num_positions % self.size
        positions_BT = functional.pad(inputs["position_ids"], (0, padding), value=-1)
        layout = SequenceLayout(
            self._group, self.size, self._rank, positions_BT, is_packed=batch.is_packed, pads_left=batch.pads_left
        )
        labels = _packed(batch) if batch.is_packed else batch.labels
        fits = labels is not None and labels.shape[1] == num_positions
        return Stretch(
            inputs={
                "input_ids": layout.stretch(functional.pad(inputs["input_ids"], (0, padding))),
                "position_ids": layout.stretch(positions_BT.clamp(min=0)),
                LAYOUT: layout,
            },
            labels=layout.stretch(functional.pad(labels, (0, padding), value=IGNORED_LABEL))
            if fits and labels is not None
            else None,
            layout=layout,
            batch=batch,
        )


def sequence_parallel(model: Any, mesh: DeviceMesh | None) -> SequenceParallel | None:
    """What splits the passes of a model on a mesh; None where each rank has its sequences for itself."""
    return SequenceParallel(model, mesh) if mesh is not None and mesh.ulysses_world_size > 1 else None


def _packed(batch: ModelBatch) -> torch.Tensor | None:
    if batch.labels is None or batch.labels.shape[1] < max(batch.lengths):
        return None
    return torch.cat([row[:length] for row, length in zip(batch.labels, batch.lengths, strict=True)])[None]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sequence_layout: SequenceLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers asks for: (B, H, S, D) in, (B, S, H, D) out."""
    if sequence_layout is None:
        raise ConfigError(f"ulysses_size: {type(module).__name__} is not told how sequences are shared; set it to 1")
    own = next((name for name in NOT_SHARED if kwargs.get(name) is not None), None)
    if own is not None:
        raise ConfigError(f"ulysses_size: {type(module).__name__} attends with {own}, which ranks cannot share yet")
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    if num_key_heads % sequence_layout.size:
        # Fewer keys than ranks: each rank gets those of its own queries.
        key, value = (values.repeat_interleave(num_heads // num_key_heads, dim=1) for values in (key, value))
    query, key, value = (sequence_layout.to_heads(values) for values in (query, key, value))
    mask = sequence_layout.mask(sliding_window)
    if softcap is not None or s_aux is not None:
        # Each head has a sink of its own, and this rank has some heads.
        sinks = None if s_aux is None else s_aux.chunk(sequence_layout.size)[sequence_layout.rank]
        scores_BNTT = _scores(query, key, mask, scaling=scaling, softcap=softcap)
        shares_BNTT = functional.dropout(_shares(scores_BNTT, sinks), dropout)
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return sequence_layout.to_stretch(shares_BNTT.to(values) @ values).transpose(1, 2).contiguous(), None
    attended_BNTD = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return sequence_layout.to_stretch(attended_BNTD).transpose(1, 2).contiguous(), None


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """How much each position attends to each other one, before the softmax (B, N, T, T)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores_BNTT = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores_BNTT = softcap * torch.tanh(scores_BNTT / softcap)
    sees = torch.ones_like(scores_BNTT[:1, :1], dtype=torch.bool).tril() if mask is None else mask
    return scores_BNTT.float().masked_fill(~sees, -torch.inf)


def _shares(scores_BNTT: torch.Tensor, sinks_N: torch.Tensor | None) -> torch.Tensor:
    """The softmax; what goes into a head's sink goes nowhere."""
    if sinks_N is None:
        return scores_BNTT.softmax(-1)
    sinks_BNT1 = sinks_N.to(scores_BNTT)[:, None, None].expand(*scores_BNTT.shape[:-1], 1)
    return torch.cat([scores_BNTT, sinks_BNT1], dim=-1).softmax(-1)[..., :-1]


def _wrap_linear_attention(model: Any) -> bool:
    layers = [module for name, module in model.named_modules() if name.endswith(f".{LINEAR_ATTENTION}")]
    for layer in layers:
        layer.forward = partial(_run_whole, layer.forward)
    return bool(layers)


def _run_whole(
    run: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    *,
    sequence_layout: SequenceLayout,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    whole_BTH = sequence_layout.gather(hidden_states, sums=True)
    return sequence_layout.stretch(run(whole_BTH, attention_mask=sequence_layout.kept_BT(), **kwargs))


class _Exchange(torch.autograd.Function):
    """Part r of the first dimension goes to rank r; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(received, gradient.contiguous(), group=ctx.group)
        return received, None


class _Gather(torch.autograd.Function):
    """All ranks' stretches as one. The gradient of a stretch is its own rank's, or the sum of all ranks'."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, group: distributed.ProcessGroup, size: int, rank: int, sums: bool
    ) -> torch.Tensor:
        ctx.group, ctx.size, ctx.rank, ctx.sums = group, size, rank, sums
        parts = [torch.empty_like(values) for _ in range(size)]
        distributed.all_gather(parts, values, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if not ctx.sums:
            return gradient.chunk(ctx.size, dim=1)[ctx.rank], None, None, None, None
        parts = torch.stack(gradient.chunk(ctx.size, dim=1))
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=ctx.group)
        return received.sum(dim=0), None, None, None, None
