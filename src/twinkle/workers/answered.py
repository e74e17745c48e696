"""What an operation that is no pass came to."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.errors import WindowFailed
from twinkle.core.operation import Claim


@dataclass(frozen=True)
class Answered:
    """The result of an operation, and what it had to compute once more for it."""

    result: bytes
    num_replayed_tokens: int = 0
    clears_gradients: bool = False
    """Whether it emptied the gradients on purpose: what failed of them before no longer counts."""


def window_failed(claim: Claim) -> WindowFailed:
    """Why a step is not applied whose gradients would have been incomplete."""
    return WindowFailed(
        f"optim_step {claim.seq} was not applied: operation {claim.failed_window_seq} of its accumulation"
        " window failed, so the gradients would have been incomplete; they were cleared. Send the batch again."
    )
