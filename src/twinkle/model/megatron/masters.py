"""What the optimizer steps: the weights themselves, or float32 copies of weights in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Masters:
    """``parameters`` by name; where a weight is float32 already, it is its own."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter]) -> None:
        self._weights = dict(weights)
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: weight if weight.dtype == torch.float32 else torch.nn.Parameter(weight.detach().float())
            for name, weight in weights.items()
        }

    def collect(self) -> None:
        """Add what a backward pass has left at the weights to the copies' gradients."""
        for weight, master in self._copies():
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies to the weights."""
        for weight, master in self._copies():
            weight.copy_(master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy weights that were loaded."""
        for weight, master in self._copies():
            master.copy_(weight)

    def _copies(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        pairs = [(weight, self.parameters[name]) for name, weight in self._weights.items()]
        return [(weight, master) for weight, master in pairs if master is not weight]
