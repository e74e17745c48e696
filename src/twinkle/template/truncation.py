"""What becomes of rows that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from twinkle.data_format.media import num_pictures, pictures_between
from twinkle.data_format.row_error import RowError

TruncationStrategy = Literal["raise", "left", "right", "split", "delete"]
TRUNCATION_STRATEGIES: tuple[TruncationStrategy, ...] = get_args(TruncationStrategy)

IGNORED_LABEL = -100
KINDS = "mm_token_type_ids"
"""Of each token what it stands for; 0 is text."""


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
        RowError: The strategy is ``raise``, or a row with pictures cannot be cut in this way.
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
    if strategy == "left":
        start = num_tokens - max_length
        return [_part_with_pictures(row, start, num_tokens) if row.media else _part(row, start, num_tokens)]
    if strategy == "right":
        kept = _part_with_pictures(row, 0, max_length) if row.media else _part(row, 0, max_length)
        return [replace(kept, labels=np.append(kept.labels[:-1], IGNORED_LABEL))]
    if row.media:
        return _pieces_with_pictures(row, max_length)
    return [_part(row, start, min(start + max_length, num_tokens)) for start in range(0, num_tokens, max_length)]


def _pieces_with_pictures(row: TokenRow, max_length: int) -> list[TokenRow]:
    """The row in pieces, each with its pictures; a piece ends before a picture that would not be whole in it.

    Raises:
        RowError: It cannot be told which tokens are which picture, or one is longer than a piece may be.
    """
    pictures = _pictures_of(row)
    num_tokens, start, pieces = len(row.tokens), 0, []
    while start < num_tokens:
        end = min(start + max_length, num_tokens)
        for begin, behind in pictures:
            if begin <= end <= behind and end < num_tokens:
                end = begin - 1
                if end <= start:
                    raise RowError(
                        "images",
                        f"hold one of {behind - begin} tokens with those around it, max_length is {max_length}; choose"
                        " 'delete', or raise max_length",
                    )
        pieces.append(_stretch(row, pictures, start, end))
        start = end
    return pieces


def _part_with_pictures(row: TokenRow, start: int, end: int) -> TokenRow:
    """The stretch with the pictures that lie in it; one that a cut would go through is left out whole.

    Raises:
        RowError: It cannot be told which tokens are which picture, or nothing would be left.
    """
    pictures = _pictures_of(row)
    for begin, behind in pictures:
        # With the token that begins it, or the one that ends it.
        if begin < end < behind + 1 and end < len(row.tokens):
            end = max(begin - 1, 0)
        if begin - 1 < start < behind:
            start = min(behind + 1, len(row.tokens))
    if start >= end:
        raise RowError("images", "leave no room for anything else; choose 'delete', or raise max_length")
    return _stretch(row, pictures, start, end)


def _pictures_of(row: TokenRow) -> list[tuple[int, int]]:
    """Of each picture its first token and the one behind it.

    Raises:
        RowError: It cannot be told which tokens are which picture.
    """
    kinds = np.asarray(row.media.get(KINDS, ())).reshape(-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kinds != 0, [0]]).astype(np.int8)))
    pictures = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    if len(kinds) != len(row.tokens) or len(pictures) != num_pictures(row.media):
        raise RowError("images", f"are in a row of {len(row.tokens)} tokens, which is not cut; choose 'delete'")
    return pictures


def _stretch(row: TokenRow, pictures: Sequence[tuple[int, int]], start: int, end: int) -> TokenRow:
    """The tokens from ``start`` to before ``end`` with the pictures among them, none of which they cut."""
    kept = [number for number, (begin, behind) in enumerate(pictures) if start <= begin and behind <= end]
    part = _part(row, start, end)
    if not kept:
        return part
    positions = None if row.positions is None else row.positions[..., start:end] - row.positions[..., start:end].min()
    kinds = np.asarray(row.media[KINDS]).reshape(-1)
    media = {**pictures_between(row.media, kept[0], kept[-1] + 1), KINDS: kinds[start:end]}
    return replace(part, positions=positions, media=media)


def _part(row: TokenRow, start: int, end: int) -> TokenRow:
    return TokenRow(row.tokens[start:end], row.labels[start:end])
