"""Answers as they were sampled, and the datums that are made of them.

Shapes: T targets of a datum, its prompt's first, then the answer's A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.client.datum import Datum
from twinkle.core.batch_loss import BATCH_LOSSES, TARGETS, WEIGHTS

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompt:
    """A prompt by its place in the data, with its row's own fields."""

    place: int
    number: int
    tokens: npt.NDArray[np.int32]
    item: Mapping[str, Any]
    line: int | None = None

    def __str__(self) -> str:
        return f"row {self.number}" if self.line is None else f"line {self.line}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """One answer to a prompt: (A,) tokens, what ended it included, with the logprobs they were drawn with."""

    prompt: Prompt
    index: int
    tokens: npt.NDArray[np.int64]
    logprobs: Numbers
    has_ended: bool
    """Whether the model ended it, not the limit of tokens."""
    text: str

    @property
    def whole(self) -> npt.NDArray[np.int64]:
        """The prompt and the answer."""
        return np.concatenate([self.prompt.tokens.astype(np.int64), self.tokens])

    @property
    def num_tokens(self) -> int:
        """Of the answer."""
        return len(self.tokens)


def policy_datum(
    answer: Answer, advantages: npt.NDArray[np.float64], *, loss: str, reference: Numbers | None = None
) -> Datum:
    """An answer as an example for a loss on policies; the prompt's targets count for nothing.

    Args:
        answer: What was sampled.
        advantages: (A,) of its tokens.
        loss: Its name.
        reference: (A,) the reference's logprobs, where the loss takes them.
    """
    whole = answer.whole
    inputs: dict[str, npt.ArrayLike] = {TARGETS: whole[1:], "advantages": _padded(answer, advantages)}
    mask = _padded(answer, np.ones(answer.num_tokens))
    if loss in BATCH_LOSSES:
        inputs |= {WEIGHTS: mask, "old_logps": _padded(answer, answer.logprobs)}
        if reference is not None:
            inputs["ref_logps"] = _padded(answer, reference)
    else:
        inputs["logprobs"] = _padded(answer, answer.logprobs)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = mask
    return Datum(whole[:-1], inputs)


def of_answer(answer: Answer, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """(A,) of the answer's tokens, of (T,) values of all targets."""
    return np.asarray(values, np.float64)[-answer.num_tokens :]


def penalized(
    advantages: Sequence[npt.NDArray[np.float64]],
    logprobs: Sequence[npt.NDArray[np.float64]],
    reference: Sequence[npt.NDArray[np.float64]],
    kl_coef: float,
) -> list[npt.NDArray[np.float64]]:
    """Advantages with the price of divergence from a reference, token by token.

    ``A + kl_coef (mean(d) - d)`` with ``d = log p - log p_reference`` of the sampled tokens and the mean over the
    batch, so that the price moves weight between tokens and not the level (``incorporate_kl_penalty`` of the Tinker
    cookbook).
    """
    differences = [own - other for own, other in zip(logprobs, reference, strict=True)]
    mean = float(np.concatenate(differences).mean())
    return [own + kl_coef * (mean - gap) for own, gap in zip(advantages, differences, strict=True)]


def _padded(answer: Answer, values: npt.ArrayLike) -> Numbers:
    before = np.zeros(len(answer.prompt.tokens) - 1, np.float32)
    return np.concatenate([before, np.asarray(values, np.float32)])
