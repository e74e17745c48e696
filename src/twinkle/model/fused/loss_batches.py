"""Whose losses a pass computes at once, and what comes out of them.

Where bits are promised a datum's loss is computed by itself: what an elementwise kernel makes of a value may depend on
where in a tensor the value lies. An accelerator computes those of all datums at once that have one loss, its settings
and its inputs in common, whosever they are: a call for each would cost it more than all of them. Each token then has a
term of its own, of its datum's numbers alone, and the host adds up those of each datum.

Shapes: N tokens of a datum, T those of a batch, K targets a token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from twinkle.core.batch_loss import CORRECT_TOKENS
from twinkle.core.errors import UserError
from twinkle.infra.sending import send
from twinkle.loss import DatumLoss
from twinkle.loss.datum import Put
from twinkle.loss.operation_work import OperationWork
from twinkle.loss.sequences import ManyDatums


class DatumResult(NamedTuple):
    """What came out of a datum's loss, on the host."""

    logprobs: np.ndarray
    loss: float
    metrics: Mapping[str, float]


@dataclass(eq=False)
class LossBatch:
    """Datums whose losses are computed at once, their tokens one after another, and what the head found of them."""

    loss: DatumLoss
    inputs: Mapping[str, torch.Tensor]
    is_by_token: bool
    """Whether each token has a term of its own; else it is of one datum, whose terms the loss adds up itself."""
    work: OperationWork | None = None
    """What the whole operation may take, where its loss is the client's own; ``spent`` of it is this datum's."""
    spent: int = 0
    logprobs: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    correct: list[torch.Tensor] = field(default_factory=list)
    """Of each token, where the loss counts them: 1 if it counts and its target was the likeliest one, else 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: UserError | None = None
    """Why a loss of the client's own could not be computed; the datum then has no gradient."""
    d_logprobs: torch.Tensor | None = None
    """Known before the vocabulary pass only for a long datum whose loss needs the whole sequence."""

    def inputs_of(self, start: int, end: int) -> Mapping[str, torch.Tensor]:
        """Those of some of its tokens; all of them where the loss of one datum needs the whole sequence."""
        if not (self.loss.separable or self.is_by_token):
            return self.inputs
        return {name: values[start:end] for name, values in self.inputs.items()}

    def evaluate(self, logprobs: torch.Tensor, start: int, lengths: Sequence[int]) -> torch.Tensor:
        """Take in what the loss says of so many tokens of each datum, from ``start`` on; the gradient by logprobs."""
        self.logprobs.append(logprobs)
        evaluate = self.loss.evaluate
        if self.is_by_token:
            datums = ManyDatums(lengths, partial(send, dtype=torch.int64, device=logprobs.device))
            evaluate = partial(self.loss.evaluate_tokens, datums=datums)
        try:
            if self.work is not None and (refusal := self.work.refusal(self.work.spent)) is not None:
                raise refusal
            evaluation = evaluate(logprobs, self.inputs_of(start, start + sum(lengths)))
        except UserError as error:
            self.failure = error
            return torch.zeros_like(logprobs)
        self.losses.append(evaluation.loss)
        self.metrics = evaluation.metrics
        self.spent = evaluation.work
        if self.work is not None:
            self.work.spent += evaluation.work
        return evaluation.d_logprobs

    @property
    def results(self) -> list[torch.Tensor]:
        """All that the host is to be told, piece after piece; nothing of a loss that failed."""
        return [] if self.failure is not None else [*self.logprobs, *self.losses, *self.correct]

    def read(self, found: Iterator[np.ndarray]) -> BatchResult:
        """Take as many values as ``results`` has tensors."""
        logprobs, losses, correct = ([next(found) for _ in each] for each in (self.logprobs, self.losses, self.correct))
        return BatchResult(
            _joined(logprobs),
            _joined(losses) if self.is_by_token else np.array(float(sum(float(loss) for loss in losses))),
            _joined(correct) if correct else None,
            self.metrics,
        )


@dataclass(frozen=True, eq=False)
class BatchResult:
    """What came out of a batch, on the host: ``losses`` of each token, or of its one datum."""

    logprobs: np.ndarray
    losses: np.ndarray
    correct: np.ndarray | None
    metrics: Mapping[str, float]

    def of_datum(self, start: int, end: int) -> DatumResult:
        """That of the datum whose tokens these are."""
        loss = self.losses if self.losses.ndim == 0 else self.losses[start:end].sum(dtype=np.float64)
        metrics = self.metrics
        if self.correct is not None:
            metrics = {**metrics, CORRECT_TOKENS: float(self.correct[start:end].sum())}
        return DatumResult(self.logprobs[start:end], float(loss), metrics)


class BatchPlace(NamedTuple):
    """The batch of a datum, and where in it the datum's tokens begin."""

    batch: LossBatch
    offset: int


def batch_losses(
    losses: Sequence[DatumLoss],
    inputs: Sequence[Mapping[str, np.ndarray]],
    works: Sequence[OperationWork | None],
    put: Put,
    *,
    together: bool,
    longest: int,
) -> list[BatchPlace]:
    """The place of each datum of a pass, given its loss and inputs; ``together`` as many in a batch as go into one.

    What is longer than ``longest`` is cut, which not every loss can be: it then has a batch of its own.
    """
    members: dict[Hashable, list[int]] = {}
    are_alone: list[bool] = []
    for number, (loss, own) in enumerate(zip(losses, inputs, strict=True)):
        can_be_cut = loss.separable or len(own["target_tokens"]) <= longest
        are_alone.append(not together or loss.is_on_host or not can_be_cut)
        members.setdefault(number if are_alone[-1] else _kind(loss, own), []).append(number)
    places: dict[int, BatchPlace] = {}
    for numbers in members.values():
        loss, first = losses[numbers[0]], inputs[numbers[0]]
        arrays = first
        if len(numbers) > 1:
            arrays = {name: np.concatenate([inputs[each][name] for each in numbers]) for name in loss.given(first)}
        is_by_token = not are_alone[numbers[0]]
        batch = LossBatch(loss, loss.tensors(arrays, put), is_by_token, works[numbers[0]])
        offset = 0
        for number in numbers:
            places[number] = BatchPlace(batch, offset)
            offset += len(inputs[number]["target_tokens"])
    return [places[number] for number in range(len(losses))]


def _kind(loss: DatumLoss, inputs: Mapping[str, np.ndarray]) -> Hashable:
    """What datums of one batch have in common; losses are equal where their settings are."""
    return loss, loss.given(inputs), inputs["target_tokens"].shape[1:]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
