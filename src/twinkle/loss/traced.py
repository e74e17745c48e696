"""The loss ``custom``: one that a client traced and the service runs, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from twinkle.core.errors import UserError
from twinkle.core.loss_graph import LossGraph
from twinkle.loss.datum import DatumLoss, Evaluation, Put
from twinkle.loss.graph_run import run_graph
from twinkle.loss.sequences import ONE_DATUM, Tokens

SURROGATE_METRIC = "surrogate_loss:sum"


@dataclass(frozen=True, kw_only=True)
class TracedLoss(DatumLoss):
    """A loss of one datum as a graph. It runs on the CPU, in float32, as it does on a client.

    Its metrics are the graph's own and ``surrogate_loss:sum``, which is what ``cross_entropy`` with the weights
    ``-dC/dlp`` comes to: a client that runs the loss itself gets that number.
    """

    name: ClassVar[str] = "custom"
    required_inputs: ClassVar[tuple[str, ...]] = ()
    separable: ClassVar[bool] = False
    is_on_host: ClassVar[bool] = True
    graph: LossGraph

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], tokens: Tokens = ONE_DATUM
    ) -> torch.Tensor:
        """The loss alone; its graph says how it is added up."""
        loss: torch.Tensor = run_graph(self.graph, [logprobs, *self._in_order(inputs)]).loss
        return loss

    def evaluate(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Evaluation:
        """The loss, its gradient by the logprobs, and its metrics.

        Raises:
            UserError: The graph fails on this datum, is too large for it, or returns what is no loss.
        """
        with torch.enable_grad():
            leaf = logprobs.detach().to(device="cpu", dtype=torch.float32).requires_grad_(True)
            returned = run_graph(self.graph, [leaf, *self._in_order(inputs)])
            loss = self._scalar(returned.loss)
            gradient = self._gradient(loss, leaf)
        metrics = {key: self._number(key, value) for key, value in returned.metrics.items()}
        metrics[SURROGATE_METRIC] = float((gradient * leaf.detach()).sum())
        return Evaluation(
            loss=loss.detach(),
            d_logprobs=gradient.to(device=logprobs.device, dtype=logprobs.dtype),
            metrics=metrics,
            work=returned.work,
        )

    def tensors(self, inputs: Mapping[str, np.ndarray], put: Put) -> dict[str, torch.Tensor]:
        """The declared inputs, on the CPU and of the dtype they came in."""
        return {
            declared.name: values.reshape(()) if declared.rank == 0 else values
            for declared in self.graph.inputs[1:]
            for values in (torch.as_tensor(np.array(inputs[declared.name])),)
        }

    def _in_order(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[declared.name] for declared in self.graph.inputs[1:]]

    def _scalar(self, loss: Any) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise self._failure(f"must return a scalar loss of floats, got {shape}; sum it up")
        if not loss.requires_grad:
            raise self._failure("does not depend on logprobs, so there is nothing to train")
        return loss

    def _gradient(self, loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        try:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except RuntimeError as error:
            raise self._failure(f"cannot be differentiated: {str(error).splitlines()[0][:300]}") from None
        if gradient is None:
            raise self._failure("does not depend on logprobs, so there is nothing to train")
        if not (torch.isfinite(loss) & torch.isfinite(gradient).all()):
            raise self._failure(
                f"is {loss.item()} here, and it and its gradient must be finite; check the inputs, and that no"
                " discarded branch of a where divides by zero or overflows"
            )
        return gradient

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise self._failure(f"metric {key!r} must be a scalar, got {tuple(value.shape)}")
            return float(value.detach())
        if isinstance(value, (int, float)):
            return float(value)
        raise self._failure(f"metric {key!r} must be a scalar, got {type(value).__name__}")

    def _failure(self, reason: str) -> UserError:
        return UserError(f"custom loss {self.graph.name!r} {reason}")
