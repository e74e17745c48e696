"""A batch that goes through the model in parts, with the loss and the gradient that it has at once.

A loss may compare rows or average over them, so the parts' losses do not add up to the batch's. The outputs of all
parts are computed without a graph, the loss on them together; then each part is run again for its share of the
gradient, with the random state of the first time. A loss whose gradient does not depend on the outputs needs one run.

Shapes: B rows, T positions (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from twinkle.core.errors import InvalidInput
from twinkle.loss import Loss
from twinkle.model.forward_pass import ForwardPass
from twinkle.processor.input_processor import IGNORED_LABEL

Row = Mapping[str, Any]
Scale = Callable[[torch.Tensor], torch.Tensor]
RunPart = Callable[[Sequence[Row]], ForwardPass]

BY_ROW = frozenset({"embeddings"})
"""Outputs that have no positions."""

PADDING = {"routed_experts": -1}
"""What stands after the end of a row, where it is not 0."""


class MicroBatches:
    """The parts of one batch.

    Args:
        run: Runs rows through the model; with a graph where gradients are on.
        rows: The batch.
        size: Rows of a part.
        pads_left: Where ``run`` pads.
        agree: What all ranks that run together make of their numbers of parts: the largest. A rank with fewer goes on
            with its first part, whose results it drops.
    """

    def __init__(
        self,
        run: RunPart,
        rows: Sequence[Row],
        size: int,
        *,
        pads_left: bool,
        agree: Callable[[int], int],
    ) -> None:
        if size < 1:
            raise InvalidInput("micro_batch_size", f"is {size}, must be at least 1")
        self._run = run
        self._parts = [rows[start : start + size] for start in range(0, len(rows), size)] or [rows]
        self._num_idle = agree(len(self._parts)) - len(self._parts)
        self._pads_left = pads_left
        self._states: list[dict[str, torch.Tensor]] = []

    def score(self) -> ForwardPass:
        """The batch's outputs without a graph, leaves in training; ``backward`` adds the gradient of a loss of them."""
        passes: list[ForwardPass] = []
        for part in self._parts:
            self._states.append(random_state())
            with torch.no_grad():
                passes.append(self._run(part))
        for _ in range(self._num_idle):
            with torch.no_grad():
                self._run(self._parts[0])
        joined = self._join(passes)
        if joined.is_training:
            joined.outputs = {
                name: values.requires_grad_(values.is_floating_point()) for name, values in joined.outputs.items()
            }
            joined.parts = self
        return joined

    def backward(self, last: ForwardPass, scale: Scale) -> None:
        """Run the parts again for the gradient of the pass's loss."""
        assert last.loss is not None
        leaves = {name: values for name, values in last.outputs.items() if values.requires_grad}
        found = torch.autograd.grad(scale(last.loss), list(leaves.values()), allow_unused=True)
        gradients = {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
        after = random_state()
        first = 0
        for part, state in zip(self._parts, self._states, strict=True):
            set_random_state(state)
            again = self._run(part)
            first += self._add_gradient(again, gradients, first)
        for _ in range(self._num_idle):
            self._add_gradient(self._run(self._parts[0]), {}, 0)
        set_random_state(after)

    def train_linear(
        self, labels_BT: torch.Tensor, loss: Loss, loss_kwargs: Mapping[str, Any], scale: Scale
    ) -> ForwardPass:
        """One run of each part, forward and backward, for a loss whose gradient is known before its value."""
        zeros_BT = torch.zeros(labels_BT.shape, requires_grad=True, device=labels_BT.device)
        trial = ForwardPass({"labels": labels_BT}, {"logps": zeros_BT}, is_training=True, loss_kwargs=loss_kwargs)
        trial.calculate_loss(loss)
        assert trial.loss is not None
        gradients = {"logps": torch.autograd.grad(scale(trial.loss), zeros_BT)[0]}
        passes: list[ForwardPass] = []
        first = 0
        for part in self._parts:
            passes.append(self._run(part))
            first += self._add_gradient(passes[-1], gradients, first)
        for _ in range(self._num_idle):
            self._add_gradient(self._run(self._parts[0]), {}, 0)
        joined = self._join(passes)
        joined.calculate_loss(loss)
        return joined

    def _add_gradient(self, part: ForwardPass, gradients: Mapping[str, torch.Tensor], first: int) -> int:
        """Backward of the part's outputs, whose rows begin at ``first`` of the batch; how many rows it has."""
        outputs = {name: values for name, values in part.outputs.items() if values.requires_grad}
        shares = [
            self._share(gradients[name], values, first) if name in gradients else torch.zeros_like(values)
            for name, values in outputs.items()
        ]
        torch.autograd.backward(list(outputs.values()), shares)
        part.release_graph()
        return len(next(iter(part.outputs.values())))

    def _share(self, gradient: torch.Tensor, values: torch.Tensor, first: int) -> torch.Tensor:
        rows = gradient[first : first + len(values)]
        if rows.shape == values.shape:
            return rows.to(values.dtype)
        width = values.shape[1]
        return (rows[:, -width:] if self._pads_left else rows[:, :width]).to(values.dtype)

    def _join(self, passes: Sequence[ForwardPass]) -> ForwardPass:
        first = passes[0]
        names = [name for name in first.outputs if all(name in other.outputs for other in passes)]
        inputs = {
            name: self._cat([one.inputs[name] for one in passes], IGNORED_LABEL if name == "labels" else 0)
            for name in first.inputs
        }
        outputs = {
            name: torch.cat(values) if name in BY_ROW else self._cat(values, PADDING.get(name, 0))
            for name in names
            for values in [[one.outputs[name].detach() for one in passes]]
        }
        return ForwardPass(
            inputs=inputs,
            outputs=outputs,
            is_training=first.is_training,
            loss_kwargs=first.loss_kwargs,
            return_logits=first.return_logits,
        )

    def _cat(self, values: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
        width = max(rows.shape[1] for rows in values)
        return torch.cat([self._widen(rows, width - rows.shape[1], padding) for rows in values])

    def _widen(self, rows: torch.Tensor, missing: int, padding: int) -> torch.Tensor:
        sides = [missing, 0] if self._pads_left else [0, missing]
        return pad(rows, [0, 0] * (rows.dim() - 2) + sides, value=padding)


def random_state() -> dict[str, torch.Tensor]:
    """Torch's random state, on the CPU and on the accelerator."""
    state = {"cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Put the state back."""
    for device, values in state.items():
        (torch if device == "cpu" else torch.get_device_module(device)).set_rng_state(values)
