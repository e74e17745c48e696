"""A row of tokens as text, in pieces that train or do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from twinkle.template import Template

MOST_TOKENS = 400
"""Of a longer row, the beginning and the end are shown."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of which all train, or none does."""

    text: str
    trains: bool


def pieces_of(row: Mapping[str, Any], template: Template) -> Iterator[Piece]:
    """The text of an encoded row. Labels are shifted: a token trains if the position before it has a label."""
    tokens = np.asarray(row["input_ids"])
    trains = np.zeros(len(tokens), dtype=bool)
    if row.get("labels") is not None:
        trains[1:] = np.asarray(row["labels"])[:-1] >= 0
    half = MOST_TOKENS // 2
    if len(tokens) <= MOST_TOKENS:
        yield from _grouped(tokens, trains, template)
        return
    yield from _grouped(tokens[:half], trains[:half], template)
    yield Piece(f" ... {len(tokens) - MOST_TOKENS} tokens ... ", False)
    yield from _grouped(tokens[-half:], trains[-half:], template)


def _grouped(tokens: np.ndarray, trains: np.ndarray, template: Template) -> Iterator[Piece]:
    for is_trained, indices in groupby(range(len(tokens)), key=lambda index: bool(trains[index])):
        yield Piece(template.decode(tokens[list(indices)]), is_trained)
