"""The losses a client can name on the wire: each says what of one datum's logprobs is to be minimised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from twinkle.core.errors import InvalidInput
from twinkle.core.loss_graph import LossGraph
from twinkle.loss.datum import DatumLoss, LossConfig, clip, threshold
from twinkle.loss.sequences import ONE_DATUM, Tokens
from twinkle.loss.traced import TracedLoss


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(DatumLoss):
    """``-sum(w * lp)``, over K target columns too when there are several.

    Weights may be negative or zero: a custom loss of the client comes back as this one with ``w = -dC/dlp``.
    Source: the Tinker documentation of losses. Config: ``count_correct``, ours, unless it is 0: the metric
    ``correct_tokens:sum`` tells how many tokens with a weight have the likeliest one as their (first) target.
    """

    name: ClassVar[str] = "cross_entropy"
    required_inputs: ClassVar[tuple[str, ...]] = ("weights",)
    top_k_targets: ClassVar[bool] = True
    count_correct: float = 0.0

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The weighted sum."""
        return -tokens.total(inputs["weights"] * logprobs)

    def counted(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Those that have a weight, if they are to be counted."""
        weights = inputs["weights"]
        return None if self.count_correct == 0.0 else (weights if weights.dim() == 1 else weights[:, 0]) != 0


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(DatumLoss):
    """``-sum(r * A)`` with ``r = exp(lp - q)``, q the sampler's logprobs. No config. Source: Tinker's documentation."""

    name: ClassVar[str] = "importance_sampling"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The weighted sum."""
        ratio = torch.exp(logprobs - inputs["logprobs"])
        return -tokens.total(ratio * inputs["advantages"])


@dataclass(frozen=True, kw_only=True)
class StableReinforce(DatumLoss):
    """``importance_sampling``, plus ``kl_coeff * sum(r - 1 - log r)`` when ``kl_coeff`` is set.

    The exact formula of the service this name comes from is not public; this is a documented stand-in, so that recipes
    which use it by default train. The extra term estimates KL(sampler || model) without bias and is never negative. It
    covers the tokens of ``mask`` when the datum brings one, else those with a non-zero advantage, because prompt
    positions carry no sampler logprob. Config: ``kl_coeff`` (default 0, as clients send none).
    """

    name: ClassVar[str] = "stable_reinforce"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    optional_inputs: ClassVar[tuple[str, ...]] = ("mask",)
    kl_coeff: float = 0.0

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The weighted sum and the penalty."""
        log_ratio = logprobs - inputs["logprobs"]
        ratio = torch.exp(log_ratio)
        loss = -tokens.total(ratio * inputs["advantages"])
        if self.kl_coeff == 0.0:
            return loss
        counted = inputs.get("mask", inputs["advantages"]) != 0
        penalty = tokens.total(torch.where(counted, ratio - 1 - log_ratio, torch.zeros_like(ratio)))
        return loss + self.kl_coeff * penalty


@dataclass(frozen=True, kw_only=True)
class Ppo(DatumLoss):
    """``-sum(min(r * A, clip(r, low, high) * A))``.

    Config: ``clip_low_threshold`` 0.8, ``clip_high_threshold`` 1.2 (the Tinker documentation's defaults); a datum may
    bring tensors of these names, which then count instead.
    """

    name: ClassVar[str] = "ppo"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    optional_inputs: ClassVar[tuple[str, ...]] = ("clip_low_threshold", "clip_high_threshold")
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The clipped sum."""
        ratio = torch.exp(logprobs - inputs["logprobs"])
        low = threshold(inputs, "clip_low_threshold", self.clip_low_threshold)
        high = threshold(inputs, "clip_high_threshold", self.clip_high_threshold)
        advantages = inputs["advantages"]
        return -tokens.total(torch.minimum(ratio * advantages, clip(ratio, low, high) * advantages))


@dataclass(frozen=True, kw_only=True)
class Cispo(DatumLoss):
    """``-sum(stop_gradient(clip(r, low, high)) * lp * A)``: clipped tokens keep a gradient.

    Config: ``clip_low_threshold`` 0.0, ``clip_high_threshold`` 4.0 (one-sided, as the Tinker documentation has it now);
    tensors of these names in a datum count instead.
    """

    name: ClassVar[str] = "cispo"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    optional_inputs: ClassVar[tuple[str, ...]] = ("clip_low_threshold", "clip_high_threshold")
    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The weighted sum."""
        ratio = torch.exp(logprobs.detach() - inputs["logprobs"])
        low = threshold(inputs, "clip_low_threshold", self.clip_low_threshold)
        high = threshold(inputs, "clip_high_threshold", self.clip_high_threshold)
        return -tokens.total(clip(ratio, low, high) * logprobs * inputs["advantages"])


@dataclass(frozen=True, kw_only=True)
class Gspo(DatumLoss):
    """PPO's clipped objective with ``s = exp(mean(lp - q))`` over ``sequence_ratio_mask != 0`` in place of r.

    Each token's ratio is ``stop_gradient(s) * exp(lp - stop_gradient(lp))``: the value is s, the gradient goes to the
    token. A datum is one sequence. Config: ``clip_low_threshold`` 1 - 3e-4, ``clip_high_threshold`` 1 + 4e-4, the
    values of the GSPO paper (arXiv 2507.18071); tensors of these names in a datum count instead.
    """

    name: ClassVar[str] = "gspo"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages", "sequence_ratio_mask")
    optional_inputs: ClassVar[tuple[str, ...]] = ("clip_low_threshold", "clip_high_threshold")
    separable: ClassVar[bool] = False
    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The clipped sum."""
        fixed = logprobs.detach()
        counted = inputs["sequence_ratio_mask"] != 0
        log_ratio = torch.where(counted, fixed - inputs["logprobs"], torch.zeros_like(fixed))
        sequence_ratio = torch.exp(tokens.of_datum(log_ratio) / tokens.of_datum(counted).clamp(min=1))
        ratio = sequence_ratio * torch.exp(logprobs - fixed)
        low = threshold(inputs, "clip_low_threshold", self.clip_low_threshold)
        high = threshold(inputs, "clip_high_threshold", self.clip_high_threshold)
        advantages = inputs["advantages"]
        return -tokens.total(torch.minimum(ratio * advantages, clip(ratio, low, high) * advantages))


@dataclass(frozen=True, kw_only=True)
class Dro(DatumLoss):
    """``-sum(lp * A - beta / 2 * (lp - q)^2)``.

    Config: ``beta`` 0.05, the value of the Tinker documentation's example; the service's own default is not public, so
    send one.
    """

    name: ClassVar[str] = "dro"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    beta: float = 0.05

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The penalised sum."""
        penalty = 0.5 * self.beta * (logprobs - inputs["logprobs"]).square()
        return -tokens.total(logprobs * inputs["advantages"] - penalty)


DATUM_LOSSES: Mapping[str, type[DatumLoss]] = MappingProxyType(
    {loss.name: loss for loss in (CrossEntropy, ImportanceSampling, Ppo, Cispo, Dro, Gspo, StableReinforce)}
)


def create_datum_loss(name: str, config: LossConfig, graph: LossGraph | None = None) -> DatumLoss:
    """The named loss with its settings, or ``InvalidInput`` that lists what there is; ``custom`` is its ``graph``."""
    if name == TracedLoss.name:
        if graph is None:
            raise InvalidInput("loss_fn", "'custom' needs the graph of a loss; create one and name it by its loss_id")
        return TracedLoss(graph=graph)
    if name not in DATUM_LOSSES:
        known = ", ".join(sorted([*DATUM_LOSSES, TracedLoss.name]))
        raise InvalidInput("loss_fn", f"{name!r} is not known; use one of {known}")
    return DATUM_LOSSES[name].from_config(config)
