"""Elementwise functions whose results do not depend on where in a tensor a value lies.

A vectorised kernel computes an exponential with vector instructions, but what is left over at the end of a tensor (or
of one thread's share of it) with the scalar function of the C library, which may round otherwise. So a row's bits would
depend on how many rows stand around it. Here every call gets whole vectors only.

Shapes: T tokens, N features, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

VECTOR_STRIDE = 32
"""Elements a kernel takes at once: two vectors of at most 16 float32."""
PARALLEL_GRAIN = 32768
"""From this many elements a thread on, torch splits an elementwise operation over threads."""
ACTIVATION_NAMES = frozenset({"act", "act_fn", "activation_fn"})
ROTARY_NAME = "rotary_emb"
POSITIONS_PER_BLOCK = 64
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


def make_rowwise(model: torch.nn.Module, max_positions: int) -> None:
    """Replace the activations and the rotary embedding of ``model`` by rowwise ones."""
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in ACTIVATION_NAMES:
            setattr(model.get_submodule(parent), name, RowwiseActivation(module))
        elif name == ROTARY_NAME and module.rope_type in STATIC_ROPE_TYPES:
            setattr(model.get_submodule(parent), name, RotaryTable(module, max_positions))


class RowwiseActivation(torch.nn.Module):
    """An elementwise activation, called on whole vectors only."""

    def __init__(self, activation: torch.nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the activation."""
        num_features = x.shape[-1]
        surplus = -num_features % VECTOR_STRIDE
        rows_TN = x.reshape(-1, num_features)
        if surplus:
            rows_TN = functional.pad(rows_TN, (0, surplus))
        pieces = rows_TN.split(whole_vector_rows(rows_TN.shape[0], rows_TN.shape[1], torch.get_num_threads()))
        activated = [self.activation(piece) for piece in pieces]
        result = activated[0] if len(activated) == 1 else torch.cat(activated)
        return result[:, :num_features].reshape(x.shape)


def whole_vector_rows(num_rows: int, num_features: int, num_threads: int) -> list[int]:
    """How to cut rows into calls such that each thread of each call works on whole vectors (usually one call)."""
    counts: list[int] = []
    while num_rows > 0:
        take = num_rows
        while take > 1 and not _splits_evenly(take * num_features, num_threads):
            take -= 1
        counts.append(take)
        num_rows -= take
    return counts


def _splits_evenly(numel: int, num_threads: int) -> bool:
    threads = min(num_threads, -(-numel // PARALLEL_GRAIN))
    return threads <= 1 or numel % (threads * VECTOR_STRIDE) == 0


class RotaryTable(torch.nn.Module):
    """The cosines and sines of a rotary embedding, computed once per position and looked up."""

    def __init__(self, rotary: torch.nn.Module, max_positions: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.max_positions = max_positions
        self._cos_TD: torch.Tensor | None = None
        self._sin_TD: torch.Tensor | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of the given positions, in the dtype of ``x``."""
        if self._cos_TD is None or self._sin_TD is None:
            self._cos_TD, self._sin_TD = self._compute(x)
        return self._cos_TD[position_ids], self._sin_TD[position_ids]

    def _compute(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines: list[torch.Tensor] = []
        sines: list[torch.Tensor] = []
        # Blocks of one size below the grain: no thread boundary, no remainder.
        for start in range(0, self.max_positions, POSITIONS_PER_BLOCK):
            positions = torch.arange(start, start + POSITIONS_PER_BLOCK, device=x.device)
            cos, sin = self.rotary(x.detach(), positions[None])
            cosines.append(cos[0])
            sines.append(sin[0])
        return torch.cat(cosines), torch.cat(sines)
