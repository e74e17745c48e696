"""Matrix products whose rows do not feel each other.

Fusing tenants into one pass is only exact when the bits of a row of ``x @ W`` depend neither on how many rows there are
nor on where the row stands. With Intel MKL in its strict mode the plain product has that property; elsewhere the
product is cut into tiles of one fixed shape, so that the library always takes the same path.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

DEFAULT_TILE_ROWS = 64


class RowProduct:
    """``x @ W^T + bias`` by rows, either plain or in tiles of ``tile_rows`` rows (the last one padded with zeros)."""

    def __init__(self, tile_rows: int | None = None) -> None:
        self.tile_rows = tile_rows

    def __call__(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x_TK @ weight_NK^T + bias_N``."""
        if self.tile_rows is None:
            return functional.linear(x_TK, weight_NK, bias_N)
        y_TN = self._tiled(x_TK, weight_NK, self.tile_rows)
        return y_TN if bias_N is None else y_TN.add_(bias_N)

    def add_(self, y_TN: torch.Tensor, x_TK: torch.Tensor, weight_NK: torch.Tensor, scale: float) -> None:
        """Add ``scale * x_TK @ weight_NK^T`` to ``y_TN`` in place."""
        if self.tile_rows is None:
            y_TN.addmm_(x_TK, weight_NK.t(), alpha=scale)
        else:
            y_TN.add_(self._tiled(x_TK, weight_NK, self.tile_rows), alpha=scale)

    @staticmethod
    def _tiled(x_TK: torch.Tensor, weight_NK: torch.Tensor, rows: int) -> torch.Tensor:
        num_tokens = x_TK.shape[0]
        y_TN = x_TK.new_empty(num_tokens, weight_NK.shape[0])
        weight_KN = weight_NK.t()
        for start in range(0, num_tokens, rows):
            end = start + rows
            if end <= num_tokens:
                torch.mm(x_TK[start:end], weight_KN, out=y_TN[start:end])
            else:
                padded = x_TK.new_zeros(rows, x_TK.shape[1])
                padded[: num_tokens - start] = x_TK[start:]
                y_TN[start:] = (padded @ weight_KN)[: num_tokens - start]
        return y_TN
