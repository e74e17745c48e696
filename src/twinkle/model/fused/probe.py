"""Start-up checks on the real model: what is computed is what transformers computes, and no sequence feels another.

Sequences of many tenants lie side by side in one pass. An architecture whose layers carry something over from one to
the next (a state, a convolution, a norm over the pass) would show one tenant's content in another's results; it is
refused here, before anything is served.

Shapes: T packed tokens, N tokens of a sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.core.errors import ConfigError
from twinkle.model.fused.step import Decode
from twinkle.module.packed_attention import CausalSpans
from twinkle.module.targets import is_router

LENGTHS = (70, 3, 67)
"""Longer than a chunk of the layers that carry a state (64), with one in between that is shorter than a convolution."""
COMPANIES = ((1,), (0, 2))
"""Which of the sequences are changed; the others must not notice. Each is a bystander once, on both sides."""
WINDOW = 3
"""Sliding windows are made this narrow meanwhile, so that a few tokens tell whether they are kept."""
WIDTHS = ("sliding_window", "attention_chunk_size")
TOLERANCE_FLOAT32 = 1e-4
TOLERANCE_ROUTED = 1e-2
"""Rounding decides between experts that are all but equally likely, and then a token's values are others."""
TOLERANCE_HALF = 0.15
"""Measured in bfloat16 over 24 layers with experts: 0.05."""


def is_off(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """How far values are from what they should be, in words; None if not further than ``tolerance``, a share of them.

    With a tolerance of 0 not a bit may differ. NaN is always too far.
    """
    if tolerance == 0 and torch.equal(found, expected):
        return None
    difference = (found.float() - expected.float()).norm().item()
    scale = expected.float().norm().item()
    if tolerance > 0 and difference <= tolerance * max(scale, 1e-6):
        return None
    return f"off by {difference:.3g} at a scale of {scale:.3g}"


@dataclass(frozen=True)
class PackedPath:
    """Our way through a model: embeddings, hidden states of packed sequences, and logits of these."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    decode: Decode
    logits: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Sequence:
    """Token ids [N] and what the untouched model makes of them alone: logits [N, V], gradient of embeddings [N, H]."""

    token_ids: torch.Tensor
    logits: torch.Tensor
    gradient: torch.Tensor


class Probe:
    """A few sequences through the untouched model, each alone, to be matched by our packed path through it.

    Models that scale or cap their logits, or attend in a way of their own, would otherwise train silently wrong.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._weight_VH = model.get_output_embeddings().weight
        self._context = model.config.get_text_config().max_position_embeddings
        self.tolerance = _tolerance(model)
        generator = torch.Generator().manual_seed(0)
        with _narrow_windows(model):
            self._sequences = [self._alone(self._draw(min(length, self._context), generator)) for length in LENGTHS]
        self._others = [self._draw(len(sequence.token_ids), generator) for sequence in self._sequences]

    def serve(self, model: Any) -> None:
        """Match from now on another model with the same weights, in place of the one that was asked at first."""
        self._model = model
        self._weight_VH = model.get_output_embeddings().weight

    def _draw(self, length: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(self._weight_VH.shape[0], (length,), generator=generator).to(self._device)

    def _alone(self, token_ids: torch.Tensor) -> _Sequence:
        embedded: list[torch.Tensor] = []

        def begin_here(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            embedded.append(output.detach().requires_grad_(True))
            return embedded[0]

        projected: list[torch.Tensor] = []
        hooks = (
            self._model.get_input_embeddings().register_forward_hook(begin_here),
            self._model.get_output_embeddings().register_forward_hook(lambda *call: projected.append(call[2][0])),
        )
        try:
            logits_NV = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        # The sum of one logit a token, before any cap: its gradient by the hidden states is the output weight's rows.
        (gradient,) = torch.autograd.grad(projected[0].gather(1, token_ids[:, None]).sum(), embedded)
        return _Sequence(token_ids, logits_NV.detach().float(), gradient[0].detach())

    def compare(self, path: PackedPath, architecture: str) -> None:
        """Raise ``ConfigError`` when packed sequences have other logits or gradients than each alone before."""
        with _narrow_windows(self._model):
            hidden, gradients = self._packed(path, changed=(), poisoned=False)
        for number, (sequence, hidden_NH, gradient_NH) in enumerate(
            zip(self._sequences, hidden, gradients, strict=True), start=1
        ):
            logits_NV = path.logits(hidden_NH)
            for name, found, expected in (
                ("logits", logits_NV, sequence.logits),
                # What lies behind the embeddings has none of its own in the untouched model.
                ("gradients", gradient_NH[:, : sequence.gradient.shape[1]], sequence.gradient),
            ):
                if off := is_off(found, expected, self.tolerance):
                    raise ConfigError(
                        f"{architecture} does not compute the same {name} in packed form: sequence {number} of "
                        f"{len(hidden)} is {off} against the same alone; this architecture is not supported"
                    )

    def isolate(self, path: PackedPath, architecture: str, *, exact: bool) -> None:
        """Raise ``ConfigError`` when what is beside a sequence in a pass shows in its hidden states or gradients.

        What is beside it changes in content and in position, then is NaN, which no arithmetic hides.

        Args:
            path: Our way through the model.
            architecture: Its name.
            exact: Not a bit may change; else nothing above the tolerance of the dtype.
        """
        tolerance = 0.0 if exact else self.tolerance
        expected = self._packed(path, changed=(), poisoned=False)
        for changed, poisoned in itertools.product(COMPANIES, (False, True)):
            found = self._packed(path, changed=changed, poisoned=poisoned)
            for number in sorted(set(range(len(LENGTHS))) - set(changed)):
                for kind in (0, 1):
                    if off := is_off(found[kind][number], expected[kind][number], tolerance):
                        company = "NaN" if poisoned else "other content"
                        raise ConfigError(
                            f"{architecture} does not keep sequences apart: with {company} beside it in a pass, the "
                            f"{('hidden states', 'gradients')[kind]} of sequence {number + 1} of {len(LENGTHS)} are "
                            f"{off}; what one tenant sends would show in another's results, so this architecture is "
                            "not supported"
                        )

    def _packed(
        self, path: PackedPath, *, changed: Collection[int], poisoned: bool
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Hidden states and gradients of embeddings, sequence by sequence, of one pass with some of them changed."""
        token_ids: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        for number, sequence in enumerate(self._sequences):
            length = len(sequence.token_ids)
            is_other = number in changed and not poisoned
            token_ids.append(self._others[number] if is_other else sequence.token_ids)
            # Far off, where positions that are scaled by the longest sequence of a pass would be scaled for all.
            start = self._context - length if is_other else 0
            positions.append(torch.arange(start, start + length, device=self._device))
        lengths = [len(tokens) for tokens in token_ids]
        ends = list(itertools.accumulate(lengths))
        tokens_T = torch.cat(token_ids)
        embeddings_TH = path.embed(tokens_T).detach().clone()
        if poisoned:
            for number in changed:
                embeddings_TH[ends[number] - lengths[number] : ends[number]] = torch.nan
        embeddings_TH.requires_grad_(True)
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        hidden_TH = path.decode(embeddings_TH, torch.cat(positions), [], CausalSpans(spans))
        (gradient_TH,) = torch.autograd.grad(hidden_TH, embeddings_TH, self._weight_VH[tokens_T])
        return hidden_TH.detach().split(lengths), gradient_TH.split(lengths)


def _tolerance(model: Any) -> float:
    if model.get_output_embeddings().weight.dtype != torch.float32:
        return TOLERANCE_HALF
    routes = any(is_router(path) for path, _ in model.named_modules())
    return TOLERANCE_ROUTED if routes else TOLERANCE_FLOAT32


@contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """Within this context every sliding window or chunk is ``WINDOW`` wide, in the model's config and in its layers."""
    holders = [model.config.get_text_config(), *model.modules()]
    widths = [
        (holder, name, getattr(holder, name))
        for holder in holders
        for name in WIDTHS
        if isinstance(getattr(holder, name, None), int)
    ]
    for holder, name, _ in widths:
        setattr(holder, name, WINDOW)
    try:
        yield
    finally:
        for holder, name, width in widths:
            setattr(holder, name, width)
