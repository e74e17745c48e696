"""Which experts each token went to: recorded in one pass, and taken again in another.

A policy is compared with the one that sampled by the ratio of their probabilities. In a mixture of experts a rounding
error of a router sends a token elsewhere, and the ratio says nothing any more; with the routing replayed both have gone
the same way (arXiv 2507.18071 section 5.3, arXiv 2510.11370).

Shapes: B rows, T positions (padded), P positions of all rows one after the other, L layers with experts, E experts of a
layer, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from twinkle.core.errors import InvalidInput
from twinkle.processor import ModelBatch

FREE = -1
"""In place of an expert: the router chooses."""

FIELD = "routed_experts"


class RouterReplayAction(StrEnum):
    """What a pass does with routing. The backward pass takes the one of its forward pass, whichever is said."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"

    @classmethod
    def of(cls, value: object) -> RouterReplayAction | None:
        """The action that a script names, as a member or as text.

        Raises:
            InvalidInput: There is no such action.
        """
        if value is None:
            return None
        try:
            return cls(str(value))
        except ValueError as error:
            raise InvalidInput("router_replay_action", f"is {value!r}, must be one of {', '.join(cls)}") from error


class RouterReplay:
    """The routers of one model.

    A layer's decision is the ``topk`` over its experts within the block that holds them, whatever comes before and
    after it; replayed experts have the weights that the router now gives them, gradient included.

    Raises:
        InvalidInput: The model has no experts.
    """

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        blocks = [module for module in model.modules() if "experts" in dict(module.named_children())]
        sizes = config.to_dict()
        counts = [sizes[name] for name in ("num_experts", "n_routed_experts", "num_local_experts") if sizes.get(name)]
        if not blocks or not counts or not sizes.get("num_experts_per_tok"):
            raise InvalidInput("router_replay_action", f"{type(model).__name__} has no experts to route to")
        self._num_experts, self._top_k = int(counts[0]), int(sizes["num_experts_per_tok"])
        self._wanted: list[torch.Tensor] | None = None
        self._recorded: list[torch.Tensor | None] = [None] * len(blocks)
        self._is_on = False
        self._modes: list[TorchFunctionMode] = []
        for layer, block in enumerate(blocks):
            block.register_forward_pre_hook(self._enter(layer))
            block.register_forward_hook(self._leave, always_call=True)

    def begin(self, action: RouterReplayAction | None, rows: Sequence[Mapping[str, Any]], batch: ModelBatch) -> None:
        """Say what the next pass, and its backward pass, do. Rows without ``routed_experts`` are routed freely.

        Raises:
            InvalidInput: A row's routing is not (T, L, K) with experts of this model.
        """
        self._is_on = action is not None
        self._recorded = [None] * len(self._recorded)
        self._wanted = None
        if action is None or action is RouterReplayAction.RECORD or not any(FIELD in row for row in rows):
            return
        if len(rows) != len(batch.lengths):
            raise InvalidInput(FIELD, "belongs to rows of one sequence each; send them unpacked")
        routes = [
            self._route(f"inputs[{index}].{FIELD}", row.get(FIELD), length)
            for index, (row, length) in enumerate(zip(rows, batch.lengths, strict=True))
        ]
        laid_out_PLK = _lay_out(routes, batch)
        self._wanted = list(laid_out_PLK.to(batch.model_inputs["input_ids"].device).unbind(1))

    def recorded(self, batch: ModelBatch) -> torch.Tensor:
        """Where the tokens of the last pass went, (B, T, L, K) on the CPU; -1 after the end of a row."""
        layers = [layer for layer in self._recorded if layer is not None]
        if len(layers) < len(self._recorded):
            raise InvalidInput("router_replay_action", "some routers of this model do not choose by topk")
        laid_out_PLK = torch.stack(layers, dim=1).cpu()
        rows: list[torch.Tensor] = []
        if batch.is_packed:
            rows = list(laid_out_PLK.split(batch.lengths))
        else:
            width = batch.model_inputs["input_ids"].shape[1]
            for row_TLK, length in zip(laid_out_PLK.split(width), batch.lengths, strict=True):
                rows.append(row_TLK[-length:] if batch.pads_left else row_TLK[:length])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=FREE)

    def _route(self, field: str, value: Any, length: int) -> torch.Tensor:
        """One row's routing, (length, L, K): cut where it is longer, free where it is shorter."""
        free = torch.full((length, len(self._recorded), self._top_k), FREE, dtype=torch.int64)
        if value is None:
            return free
        given_TLK = torch.as_tensor(value).to("cpu", torch.int64)
        if given_TLK.dim() != 3 or given_TLK.shape[1:] != free.shape[1:]:
            wanted = f"(tokens, {free.shape[1]}, {free.shape[2]})"
            raise InvalidInput(field, f"has shape {tuple(given_TLK.shape)}, this model's is {wanted}")
        if given_TLK.numel() and (int(given_TLK.max()) >= self._num_experts or int(given_TLK.min()) < FREE):
            raise InvalidInput(field, f"names experts that are not there; a layer has {self._num_experts}")
        there = min(length, len(given_TLK))
        free[:there] = given_TLK[:there]
        return free

    def _enter(self, layer: int) -> Callable[..., None]:
        def enter(module: torch.nn.Module, inputs: Any) -> None:
            if self._is_on:
                mode = _Choice(self, layer)
                mode.__enter__()
                self._modes.append(mode)

        return enter

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)

    def is_decision(self, scores: torch.Tensor, k: int) -> bool:
        """Whether a topk chooses the experts of tokens."""
        return scores.shape[-1] == self._num_experts and k == self._top_k

    def choose(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """The experts that a layer takes in place of those it has chosen, which are noted otherwise."""
        flat_PK = chosen.flatten(0, -2)
        if self._wanted is None:
            self._recorded[layer] = flat_PK.detach()
            return chosen
        wanted_PK = self._wanted[layer]
        is_free = (wanted_PK == FREE).any(dim=-1, keepdim=True)
        return torch.where(is_free, flat_PK, wanted_PK).view_as(chosen)


class _Choice(TorchFunctionMode):
    """Takes part in one layer's choice of experts."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay = replay
        self._layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else named["input"]
        k = args[1] if len(args) > 1 else named["k"]
        if not self._replay.is_decision(scores, int(k)):
            return result
        indices = self._replay.choose(self._layer, result.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def _lay_out(routes: Sequence[torch.Tensor], batch: ModelBatch) -> torch.Tensor:
    """The rows' routing in the order in which the model sees tokens, padding included, (P, L, K)."""
    if batch.is_packed:
        return torch.cat(list(routes))
    side = "left" if batch.pads_left else "right"
    padded = torch.nn.utils.rnn.pad_sequence(list(routes), batch_first=True, padding_value=FREE, padding_side=side)
    return padded.flatten(0, 1)
