"""The updates of the active adapter, added to what Megatron's linear layers give.

Layers stay what and where they are; a hook adds. The product with ``A`` has few columns, so what tensor ranks tell each
other for it is small: it, not the inputs, is brought together.

Shapes: N tokens of this rank, R the ranks of all parts' updates together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.nn import functional

from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.lora.sites import Site, picked_rows

SAME_ON_TENSOR_RANKS = "data-parallel-rng"
OWN_OF_TENSOR_RANK = "model-parallel-rng"


@dataclass(frozen=True)
class Pair:
    """One part's update, as this rank holds it."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter
    scale: float


@dataclass
class Active:
    """Whose update is added now: by layers' names, a pair or None for each part."""

    pairs: Mapping[str, Sequence[Pair | None]] = field(default_factory=dict)
    dropout: float = 0.0


class UpdatedLayer:
    """Adds the active adapter's update to one layer's output.

    Args:
        site: The layer.
        active: What is active.
        layout: The ranks.
        is_sequence_parallel: Whether each tensor rank has some of the tokens between layers.
    """

    def __init__(self, site: Site, active: Active, layout: Layout, *, is_sequence_parallel: bool) -> None:
        self._site = site
        self._active = active
        self._group = layout.groups.tp if site.expert is None else layout.groups.expt_tp
        self._is_sequence_parallel = is_sequence_parallel
        self._rows: tuple[torch.Tensor, ...] = ()
        self._order = torch.empty(0, dtype=torch.int64)
        if not site.splits_inputs:
            self._rows, self._order = picked_rows(site.named, site.parts, self._group.rank(), self._group.size())

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Megatron's pair of output and bias, the update added to the output."""
        pairs = self._active.pairs.get(self._site.name)
        if pairs is None:
            return output
        value, bias = output
        taken = self._dropped(inputs[0]) if module.training else inputs[0]
        return value + self._update(taken, pairs, value), bias

    def _update(self, x: torch.Tensor, pairs: Sequence[Pair | None], value: torch.Tensor) -> torch.Tensor:
        there = [pair for pair in pairs if pair is not None]
        hidden_NR = functional.linear(x, torch.cat([pair.a for pair in there]).to(x.dtype))
        hidden = iter(self._together(hidden_NR).split([len(pair.a) for pair in there], dim=-1))
        if self._site.splits_inputs:
            [pair] = there
            return functional.linear(next(hidden), pair.b.to(x.dtype)) * pair.scale
        updates = [
            value.new_zeros(*value.shape[:-1], len(rows))
            if pair is None
            else functional.linear(next(hidden), pair.b.to(x.dtype)) * pair.scale
            for pair, rows in zip(pairs, self._rows, strict=True)
        ]
        joined = torch.cat(updates, dim=-1)
        return joined if len(updates) == 1 else joined.index_select(-1, self._order.to(x.device))

    def _together(self, hidden_NR: torch.Tensor) -> torch.Tensor:
        """What every rank's rows of ``B`` take: of all inputs, for the tokens that the layer's output has."""
        if self._site.expert is not None:
            # Each rank has the tokens of all; what they make of them, and gradients, are summed on the way back.
            return hidden_NR
        if self._site.splits_inputs:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._is_sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        else:
            reduce = (
                gather_from_sequence_parallel_region
                if self._is_sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        summed: torch.Tensor = reduce(hidden_NR, group=self._group)
        return summed

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        if not self._active.dropout:
            return x
        is_same = not self._site.splits_inputs and not self._is_sequence_parallel
        with get_cuda_rng_tracker().fork(SAME_ON_TENSOR_RANKS if is_same else OWN_OF_TENSOR_RANK):
            return functional.dropout(x, self._active.dropout)
