"""What losses of pairs of answers have in common.

A batch holds pairs: row 2i is the chosen answer, row 2i + 1 the rejected one.

Shapes: B rows, P = B / 2 pairs, T positions (padded).
"""

from __future__ import annotations

import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss.base import Loss, Tensors, row_means, target_logps, token_mean


def split_pairs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen and rejected of an interleaved batch."""
    if len(rows) % 2:
        raise InvalidInput(
            "inputs", f"has {len(rows)} rows; preference losses take pairs: chosen, rejected, chosen, ..."
        )
    return rows[0::2], rows[1::2]


class PreferenceLossBase(Loss):
    """Base of losses that compare a chosen answer with a rejected one; derive from it and define ``__call__``."""

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def logps(self, inputs: Tensors, outputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs of the labels (B, T), zero where they are ignored, and the mask of the trained positions."""
        return target_logps(inputs, outputs, self.ignore_index)

    def pair_sums(self, inputs: Tensors, outputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed logprobs of the chosen rows and of the rejected ones, each (P,)."""
        return split_pairs(self.logps(inputs, outputs)[0].sum(dim=1))

    def pair_means(self, inputs: Tensors, outputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by token: each row's mean over its trained tokens."""
        return split_pairs(row_means(*self.logps(inputs, outputs)))

    def chosen_nll(self, inputs: Tensors, outputs: Tensors) -> torch.Tensor:
        """The mean negative logprob of the chosen rows' tokens."""
        logps_BT, mask_BT = self.logps(inputs, outputs)
        return -token_mean(split_pairs(logps_BT)[0], split_pairs(mask_BT)[0])
