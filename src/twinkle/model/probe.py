"""Start-up check on the real model: does our packed path compute what transformers' own computes?

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from twinkle.core.errors import ConfigError

NUM_TOKENS = 6
WINDOW = 3
"""Sliding windows are made this narrow meanwhile, so that a few tokens tell whether they are kept."""
TOLERANCE_FLOAT32 = 1e-4
TOLERANCE_HALF = 5e-2


class Probe:
    """The logits of the untouched model for a few tokens, to be matched by our own path through it.

    Models that scale or cap their logits, or attend in a way of their own, would otherwise train silently wrong.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._dtype = model.get_output_embeddings().weight.dtype
        self._token_ids = torch.arange(NUM_TOKENS, device=device) % model.get_output_embeddings().weight.shape[0]
        with torch.inference_mode(), _narrow_windows(model):
            self._logits_TV = model(input_ids=self._token_ids[None], use_cache=False).logits[0].float()

    def compare(self, compute: Callable[[torch.Tensor], torch.Tensor], architecture: str) -> None:
        """Raise ``ConfigError`` when ``compute`` has other logits [T, V] for token ids [T]."""
        with _narrow_windows(self._model):
            logits_TV = compute(self._token_ids)
        difference = (logits_TV - self._logits_TV).abs().max().item()
        scale = self._logits_TV.abs().max().item()
        tolerance = TOLERANCE_FLOAT32 if self._dtype == torch.float32 else TOLERANCE_HALF
        if not difference <= tolerance * max(scale, 1e-6):
            raise ConfigError(
                f"{architecture} does not compute the same logits in packed form (off by {difference:.3g} "
                f"at a scale of {scale:.3g}); this architecture is not supported"
            )


@contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """Within this context every sliding window of the model is ``WINDOW`` wide, in its config and in its layers."""
    holders = [model.config.get_text_config(), *model.modules()]
    widths = [
        (holder, holder.sliding_window)
        for holder in holders
        if isinstance(getattr(holder, "sliding_window", None), int)
    ]
    for holder, _ in widths:
        holder.sliding_window = WINDOW
    try:
        yield
    finally:
        for holder, width in widths:
            holder.sliding_window = width
