"""What becomes of rows that are too long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from twinkle.data_format.row_error import RowError

TruncationStrategy = Literal["raise", "left", "right", "split", "delete"]
TRUNCATION_STRATEGIES: tuple[TruncationStrategy, ...] = get_args(TruncationStrategy)

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Tokens and their shifted labels, and what else the model gets of the row (``media``)."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None = None
    """[N], or with pictures [3, N]; None for 0 to N - 1."""
    media: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """What is added to the row."""
        num_tokens = len(self.tokens)
        return {
            "input_ids": self.tokens,
            "labels": self.labels,
            "attention_mask": np.ones(num_tokens, dtype=np.int64),
            "position_ids": np.arange(num_tokens, dtype=np.int64) if self.positions is None else self.positions,
            "length": num_tokens,
            **self.media,
        }


def truncate(row: TokenRow, max_length: int | None, strategy: TruncationStrategy) -> list[TokenRow]:
    """The row if it is short enough; else what the strategy makes of it.

    A piece of a split row has at its end the label that follows: no target is lost between two pieces.

    Raises:
        RowError: The strategy is ``raise``, or a cut would go through pictures.
    """
    num_tokens = len(row.tokens)
    if max_length is None or num_tokens <= max_length:
        return [row]
    if strategy == "delete":
        return []
    if strategy == "raise":
        raise RowError(
            "messages",
            f"are {num_tokens} tokens, max_length is {max_length}; shorten them or choose a truncation_strategy",
        )
    if row.media:
        raise RowError("images", f"are in a row of {num_tokens} tokens, which is not cut; choose 'delete' or 'raise'")
    if strategy == "left":
        return [_part(row, num_tokens - max_length, num_tokens)]
    if strategy == "right":
        kept = _part(row, 0, max_length)
        return [replace(kept, labels=np.append(kept.labels[:-1], IGNORED_LABEL))]
    return [_part(row, start, min(start + max_length, num_tokens)) for start in range(0, num_tokens, max_length)]


def _part(row: TokenRow, start: int, end: int) -> TokenRow:
    return TokenRow(row.tokens[start:end], row.labels[start:end])
