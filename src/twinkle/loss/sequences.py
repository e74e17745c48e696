"""Which of the tokens that a loss is given are one datum's: all of them, or those of many one after another.

Shapes: T tokens, D datums, N tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch


class Tokens(Protocol):
    """How a loss adds up over tokens."""

    def total(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum of the terms that a loss consists of, or they themselves if somebody else adds them up."""
        ...

    def of_datum(self, values_T: torch.Tensor) -> torch.Tensor:
        """For each token the sum over all tokens of its datum, through which no gradient goes."""
        ...


class OneDatum:
    """All are one datum's."""

    def total(self, terms: torch.Tensor) -> torch.Tensor:
        """See ``Tokens``."""
        return terms.sum()

    def of_datum(self, values_T: torch.Tensor) -> torch.Tensor:
        """See ``Tokens``; a scalar, which is that of every token."""
        return values_T.sum()


ONE_DATUM = OneDatum()


class ManyDatums:
    """Of datums of these lengths. Each sum is of a datum's own numbers alone, so that NaN stays where it is.

    ``send`` brings numbers to the device of the values.
    """

    def __init__(self, lengths: Sequence[int], send: Callable[[np.ndarray], torch.Tensor]) -> None:
        self._lengths = lengths
        self._send = send
        self._places_2T: torch.Tensor | None = None

    def total(self, terms: torch.Tensor) -> torch.Tensor:
        """See ``Tokens``: a term for each token."""
        return terms

    def of_datum(self, values_T: torch.Tensor) -> torch.Tensor:
        """See ``Tokens``."""
        longest = max(self._lengths)
        if self._places_2T is None:
            datum_T = np.repeat(np.arange(len(self._lengths)), self._lengths)
            place_T = np.concatenate([np.arange(length) for length in self._lengths])
            self._places_2T = self._send(np.stack([datum_T, datum_T * longest + place_T]))
        datum_T, place_T = self._places_2T
        padded_DN = values_T.new_zeros(len(self._lengths) * longest).scatter_(0, place_T, values_T.detach())
        return padded_DN.view(len(self._lengths), longest).sum(dim=1).index_select(0, datum_T)
