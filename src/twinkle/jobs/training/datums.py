"""Rows of data as the datums of an operation.

The weights of ``cross_entropy`` are divided by what trains in the whole step, so that the step's loss is the mean over
its trained tokens however many operations carry it, and a gradient's norm does not grow with the batch. Losses over a
batch divide by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinkle.client.datum import Datum
from twinkle.core.batch_loss import TARGETS, WEIGHTS
from twinkle.jobs.data import TokenSequence
from twinkle.jobs.training.data import Example

REFERENCE = "ref_logps"

Logprobs = npt.NDArray[np.float32]
ReferenceOf = dict[int, tuple[Logprobs, ...]]
"""A row's place: for each of its sequences what the model said before it was trained."""


@dataclass(frozen=True)
class Amount:
    """How much some rows are."""

    num_tokens: int
    num_trained: int
    weight: float

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Amount:
        """Of rows, all their sequences together."""
        sequences = [sequence for example in examples for sequence in example.sequences]
        return cls(
            num_tokens=sum(len(sequence) for sequence in sequences),
            num_trained=sum(sequence.num_trained for sequence in sequences),
            weight=float(sum(np.abs(sequence.weights, dtype=np.float64).sum() for sequence in sequences)),
        )


def weighted_datums(examples: Sequence[Example], *, divide_by: float) -> list[Datum]:
    """For ``cross_entropy``: the sum over the datums of all operations of a step is its mean over trained tokens."""
    return [
        _datum(sequence, (sequence.weights / (divide_by or 1.0)).astype(np.float32))
        for example in examples
        for sequence in example.sequences
    ]


def batch_datums(examples: Sequence[Example], reference: ReferenceOf | None = None) -> list[Datum]:
    """For losses over a batch: a token trains or does not; pairs come as chosen, rejected, chosen, ..."""
    data = []
    for example in examples:
        for index, sequence in enumerate(example.sequences):
            datum = _datum(sequence, (sequence.weights != 0).astype(np.float32))
            if reference is None:
                data.append(datum)
            else:
                data.append(Datum(datum.tokens, {**datum.inputs, REFERENCE: reference[example.place][index]}))
    return data


def reference_of(examples: Sequence[Example], logprobs: Sequence[npt.ArrayLike]) -> ReferenceOf:
    """What a forward pass over the datums of some rows said of each of them."""
    found = iter(logprobs)
    return {
        example.place: tuple(np.asarray(next(found), np.float32) for _ in example.sequences) for example in examples
    }


@dataclass(frozen=True)
class Preferences:
    """How far a model prefers the chosen answers of some pairs, in units of ``log p``, against the reference if any."""

    num_pairs: int
    num_right: int
    margin: float

    def __add__(self, other: Preferences) -> Preferences:
        return Preferences(
            self.num_pairs + other.num_pairs, self.num_right + other.num_right, self.margin + other.margin
        )


def preferences_of(
    examples: Sequence[Example], logprobs: Sequence[npt.ArrayLike], reference: ReferenceOf | None
) -> Preferences:
    """Sums over pairs: how often the chosen answer gained more, and by how much."""
    told = reference_of(examples, logprobs)
    margins = [_gain(example, told, reference, 0) - _gain(example, told, reference, 1) for example in examples]
    return Preferences(len(margins), sum(margin > 0 for margin in margins), float(sum(margins)))


def _gain(example: Example, told: ReferenceOf, reference: ReferenceOf | None, index: int) -> float:
    logprobs = told[example.place][index].astype(np.float64)
    if reference is not None:
        logprobs = logprobs - reference[example.place][index]
    return float(logprobs[example.sequences[index].weights != 0].sum())


def _datum(sequence: TokenSequence, weights: npt.NDArray[np.float32]) -> Datum:
    return Datum(sequence.input_ids, {TARGETS: sequence.target_ids, WEIGHTS: weights})
