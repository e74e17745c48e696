"""Matrix products whose rows do not feel each other.

Fusing tenants into one pass is only exact when the bits of a row of ``x @ W`` depend neither on how many rows there are
nor on where the row stands. MKL in its strict mode has that property, on Intel for every shape, on AMD (with few
threads) for all but small products: those are padded. Elsewhere the product is cut into tiles of one fixed shape, so
that the library always takes the same path.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

DEFAULT_TILE_ROWS = 64
MIN_SIDE = 8
MIN_ROWS_CHOICES = (4, 8)
MIN_ROWS_THREADED = 16
"""Measured on AMD with MKL's strict mode: with one thread rows are independent from four rows and columns on (one row
takes 2 to 3.3 times as long padded to four, 3 to 4.5 times padded to eight); with 2 to 4 threads, where the columns are
few for the threads, only when there are at least as many rows."""
FEW_COLUMNS_PER_THREAD = 16
MIN_SUM_ROWS = 32
MIN_SUM_COLUMNS = 64
"""Measured likewise: threads share out the sum over tokens itself where what it adds up to is smaller on both sides."""
ALIGNMENT_BYTES = 64


class RowProduct:
    """``x @ W^T + bias`` by rows, either plain or in tiles of ``tile_rows`` rows (the last one padded with zeros).

    A plain product of fewer than ``min_rows`` rows (more with several threads) or ``min_columns`` columns is padded;
    with 1, nothing ever is.
    """

    def __init__(self, tile_rows: int | None = None, *, min_rows: int = MIN_SIDE, min_columns: int = MIN_SIDE) -> None:
        self.tile_rows = tile_rows
        self.min_rows = min_rows
        self.min_columns = min_columns

    def __call__(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x_TK @ weight_NK^T + bias_N``."""
        num_rows, num_outputs = x_TK.shape[0], weight_NK.shape[0]
        if self._is_plain(num_rows, num_outputs):
            return functional.linear(x_TK, weight_NK, bias_N)
        if num_outputs < self.min_columns:
            weight_NK = _pad_rows(weight_NK, self.min_columns)
            bias_N = None if bias_N is None else functional.pad(bias_N, (0, self.min_columns - num_outputs))
        if self.tile_rows is not None:
            y_TN = self._tiled(x_TK, weight_NK, self.tile_rows)
            y_TN = y_TN if bias_N is None else y_TN.add_(bias_N)
        else:
            y_TN = functional.linear(_pad_rows(x_TK, self._least_rows(weight_NK.shape[0])), weight_NK, bias_N)
        return y_TN[:num_rows, :num_outputs]

    def times(self, x_TK: torch.Tensor, matrix_KN: torch.Tensor) -> torch.Tensor:
        """Return ``x_TK @ matrix_KN``."""
        if self._is_plain(x_TK.shape[0], matrix_KN.shape[1]):
            return torch.mm(x_TK, matrix_KN)
        return self(x_TK, matrix_KN.t())

    def in_float32(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """``x_TK @ weight_NK^T`` in float32: a GPU sums in it anyway, and need not round what comes out."""
        if x_TK.is_cuda and x_TK.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32)
        return self(x_TK, weight_NK).float()

    def add_(self, y_TN: torch.Tensor, x_TK: torch.Tensor, matrix_KN: torch.Tensor, scale: float) -> None:
        """Add ``scale * x_TK @ matrix_KN`` to ``y_TN`` in place."""
        num_rows, num_columns = y_TN.shape
        min_rows = self._least_rows(num_columns)
        if self.tile_rows is not None or (num_columns < MIN_SIDE and self.min_rows > 1):
            # Scale and sum apart: done in one operation, the ends of a tensor may round otherwise than its middle.
            y_TN.add_(self(x_TK, matrix_KN.t()).mul_(scale))
        elif num_rows >= min_rows:
            y_TN.addmm_(x_TK, matrix_KN, alpha=scale)
        else:
            padded_TN = _pad_rows(y_TN, min_rows)
            padded_TN.addmm_(_pad_rows(x_TK, min_rows), matrix_KN, alpha=scale)
            y_TN.copy_(padded_TN[:num_rows])

    def add_outer_(self, total_MN: torch.Tensor, left_TM: torch.Tensor, right_TN: torch.Tensor, scale: float) -> None:
        """Add ``scale * left^T @ right`` to ``total_MN`` in place: a sum over tokens, the same wherever they lie."""
        if self.tile_rows is not None:
            left_TM, right_TN = _aligned(left_TM), _aligned(right_TN)
        num_outputs = left_TM.shape[1]
        is_small = num_outputs < MIN_SUM_ROWS and right_TN.shape[1] < MIN_SUM_COLUMNS and self.min_rows > 1
        if is_small and left_TM.dtype == total_MN.dtype:
            padded_TM = functional.pad(left_TM, (0, MIN_SUM_ROWS - num_outputs))
            total_MN.add_((padded_TM.t() @ right_TN)[:num_outputs], alpha=scale)
        elif left_TM.dtype == total_MN.dtype:
            total_MN.addmm_(left_TM.t(), right_TN, alpha=scale)
        else:
            total_MN.add_(left_TM.t() @ right_TN, alpha=scale)

    def _is_plain(self, num_rows: int, num_columns: int) -> bool:
        """Whether a product of so many rows and columns is made as it is, as nearly all are."""
        if self.tile_rows is not None:
            return False
        return num_columns >= self.min_columns and num_rows >= self._least_rows(num_columns)

    def _least_rows(self, num_columns: int) -> int:
        num_threads = torch.get_num_threads()
        if self.min_rows == 1 or num_threads == 1:
            return self.min_rows
        is_narrow = MIN_ROWS_THREADED < num_columns <= FEW_COLUMNS_PER_THREAD * num_threads
        return num_columns if is_narrow else MIN_ROWS_THREADED

    @staticmethod
    def _tiled(x_TK: torch.Tensor, weight_NK: torch.Tensor, rows: int) -> torch.Tensor:
        num_tokens = x_TK.shape[0]
        y_TN = x_TK.new_empty(num_tokens, weight_NK.shape[0])
        weight_KN = weight_NK.t()
        for start in range(0, num_tokens, rows):
            tile = x_TK[start : start + rows]
            y_TN[start : start + rows] = (_aligned(_pad_rows(tile, rows)) @ weight_KN)[: tile.shape[0]]
        return y_TN


def _pad_rows(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - matrix.shape[0]
    return functional.pad(matrix, (0, 0, 0, missing)) if missing > 0 else matrix


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.clone() if matrix.data_ptr() % ALIGNMENT_BYTES else matrix
