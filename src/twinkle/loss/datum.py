"""What a loss is here: a function of one datum's target logprobs, summed over its tokens.

Shapes: N tokens of a datum, K targets a token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Self

import numpy as np
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss.sequences import ONE_DATUM, ManyDatums, Tokens

LossConfig = Mapping[str, float | str]
Put = Callable[[np.ndarray], torch.Tensor]
"""Puts numbers in float32 where logprobs are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What a loss says of one datum, or of a slice of one; ``d_logprobs`` has the shape of the logprobs.

    ``loss`` is a scalar, or the term of each token where it was asked for these.
    ``metrics`` are of the datum alone and named ``name:sum`` or ``name:mean``, which is how they add up over datums.
    """

    loss: torch.Tensor
    d_logprobs: torch.Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)
    work: int = 0
    """Of a client's own loss, what it took, as ``loss/graph_run.py`` counts it."""


@dataclass(frozen=True, kw_only=True)
class DatumLoss(ABC):
    """A loss with its settings. The fields of a subclass are the config keys it knows; their values the defaults.

    Every loss is a sum, never a mean: batches may be cut anywhere and gradients of several calls add up.
    """

    name: ClassVar[str]
    required_inputs: ClassVar[tuple[str, ...]]
    """Inputs beside ``target_tokens``; each has the shape of ``target_tokens``."""
    optional_inputs: ClassVar[tuple[str, ...]] = ()
    """Known inputs that may be missing; checked like the required ones when they are there."""
    separable: ClassVar[bool] = True
    """Whether the loss of a datum is the sum of the losses of its slices (false: it needs the whole sequence)."""
    is_on_host: ClassVar[bool] = False
    """Whether it is computed on the host, whatever the device of the logprobs."""
    top_k_targets: ClassVar[bool] = False
    """Whether ``target_tokens`` may be (N, K)."""

    @abstractmethod
    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The scalar loss of one datum (or of a slice of one, where ``separable``).

        Every sum over tokens is taken by ``tokens``; of the ``total`` nothing is made that is not linear.
        """

    def evaluate(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Evaluation:
        """The loss and its gradient by the logprobs, which need not be part of a graph.

        Raises:
            UserError: A loss of the client's own cannot be computed; the others never raise.
        """
        return self._evaluate(logprobs, inputs, ONE_DATUM)

    def evaluate_tokens(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], datums: ManyDatums
    ) -> Evaluation:
        """The same of many datums, whole ones unless ``separable``: a term for each token, of its datum's numbers."""
        return self._evaluate(logprobs, inputs, datums)

    def _evaluate(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens) -> Evaluation:
        with torch.enable_grad():
            leaf = logprobs.detach().requires_grad_(True)
            value = self(leaf, inputs, tokens)
            (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return Evaluation(loss=value.detach(), d_logprobs=gradient)

    def counted(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Of which tokens (N,) it is to be told how often the model finds the target likeliest; None: of none."""
        return None

    def tensors(self, inputs: Mapping[str, np.ndarray], put: Put) -> dict[str, torch.Tensor]:
        """Those of a datum's inputs that the loss reads, where and as it wants them; they share no memory."""
        return {name: put(inputs[name]) for name in self.given(inputs)}

    def given(self, inputs: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Which of the inputs it knows a datum has."""
        return tuple(name for name in (*self.required_inputs, *self.optional_inputs) if name in inputs)

    @classmethod
    def from_config(cls, config: LossConfig) -> Self:
        """Build from ``loss_fn_config``; keys this loss does not know are ignored, as clients send them freely."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: _number(key, value) for key, value in config.items() if key in known})


def _number(key: str, value: float | str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(f"loss_fn_config.{key}", f"is {value!r}, must be a finite number")
    return number


def threshold(inputs: Mapping[str, torch.Tensor], key: str, scalar: float) -> torch.Tensor | float:
    """A clip threshold: the datum's own tensor when it brings one, else the configured number."""
    return inputs.get(key, scalar)


def clip(ratio: torch.Tensor, low: torch.Tensor | float, high: torch.Tensor | float) -> torch.Tensor:
    """``ratio`` within ``[low, high]``, where either bound may be a tensor."""
    low_t = _bound(low, ratio)
    high_t = _bound(high, ratio)
    return torch.minimum(torch.maximum(ratio, low_t), high_t)


def _bound(value: torch.Tensor | float, ratio: torch.Tensor) -> torch.Tensor:
    """A number is filled in by the device itself, which is not waited for."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype=ratio.dtype, device=ratio.device)
    return torch.full((), value, dtype=ratio.dtype, device=ratio.device)
