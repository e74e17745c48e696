"""Layers whose activations are not kept for the backward pass but computed once more in it, when memory asks for that.

Kept is then what goes into each layer, and the activations of one layer at a time (arXiv 1604.06174). Every bit is the
same: a layer computes what it computed before, for the same rows and adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from twinkle.core.errors import InvalidInput
from twinkle.infra.device_memory import GB, DeviceMemory, storages_of

MEASURED_TOKENS = 64
FREE_PART = 0.8
"""Of the memory that is free: the head and the gradients of activations need some as well."""

Again = Callable[[], AbstractContextManager[None]]


class Recomputation:
    """Switches a decoder's layers from keeping activations to computing them anew, in passes that ask for it."""

    def __init__(self, decoder: torch.nn.Module, memory: DeviceMemory) -> None:
        self._memory = memory
        self._layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
        self._budget: ActivationBudget | None = None

    @property
    def sizes(self) -> ActivationSizes | None:
        """What passes keep, once measured; None if the decoder is made of layers that cannot do it."""
        return None if self._budget is None else self._budget.sizes

    def measure(
        self,
        forward: Callable[[int], torch.Tensor],
        weights: Iterable[torch.Tensor],
        *,
        num_tokens: int,
        limit_bytes: int | None,
    ) -> None:
        """From now on passes that would keep more than the limit are computed twice.

        ``forward`` gives the hidden states [T, H] of so many tokens, with their graph.
        """
        if not self._layers:
            return
        saved = SavedBytes(list(weights))
        with saved.counting(), torch.enable_grad():
            hidden_TH = forward(num_tokens)
        kept = saved.num_bytes / num_tokens
        inputs = len(self._layers) * hidden_TH.shape[1] * hidden_TH.element_size()
        sizes = ActivationSizes(kept=kept, inputs=inputs, layer=kept / len(self._layers))
        self._budget = ActivationBudget(sizes, limit_bytes=limit_bytes, memory=self._memory)

    def refuse_oversized(self, lengths: Sequence[int]) -> None:
        """Raise ``InvalidInput`` for a datum too long for the device even alone, with each layer computed twice."""
        most = self._memory.unpromised_bytes
        if self._budget is None or most is None:
            return
        for index, num_tokens in enumerate(lengths):
            needed = self._budget.sizes.pass_bytes(num_tokens, recomputed=True)
            if needed > most:
                raise InvalidInput(
                    f"data[{index}].model_input",
                    f"has {num_tokens} tokens, for which a pass holds {needed / GB:.3g} GB even where each layer is"
                    f" computed twice; send at most {num_tokens * max(most, 0) // needed} tokens. There are at most"
                    f" {max(most, 0) / GB:.3g} GB for it: {self._memory.told()}",
                )

    def did_not_fit(self, num_tokens: int) -> bool:
        """A pass of so many tokens ran out of memory; whether it is worth another try, which keeps nothing."""
        return self._budget is not None and self._budget.did_not_fit(num_tokens)

    def of_pass(self, num_tokens: int) -> Kept:
        """What a pass over so many tokens is to keep; what is on the device only to be quick gives way before it."""
        if self._budget is None or not torch.is_grad_enabled():
            return Kept(num_bytes=0, recomputed=False)
        recomputed = self._budget.wants_recomputation(num_tokens)
        num_bytes = self._budget.sizes.pass_bytes(num_tokens, recomputed=recomputed)
        self._memory.make_room(num_bytes)
        return Kept(num_bytes=num_bytes, recomputed=recomputed)

    def keeping(self, kept: Kept, again: Again) -> AbstractContextManager[None]:
        """The context that its forward pass is made in; ``again`` is entered to compute layers anew."""
        return self._active(again) if kept.recomputed else nullcontext()

    @contextmanager
    def _active(self, again: Again) -> Iterator[None]:
        for layer in self._layers:
            layer.gradient_checkpointing = True
            # Not by plain assignment, which is typed for parts of the module.
            object.__setattr__(layer, "_gradient_checkpointing_func", partial(_checkpointed, again))
            # The layer's own flag, by which it asks for this; what is in it stays in evaluation.
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.gradient_checkpointing = False
                layer.training = False


def _checkpointed(again: Again, layer: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(
        layer,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), again()),
    )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """How much a pass keeps for its way back, and whether it computes its layers twice for that."""

    num_bytes: int
    recomputed: bool


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """What a training pass keeps for its way back, in bytes a token.

    Args:
        kept: By all layers.
        inputs: What goes into all layers.
        layer: By the one layer that is computed anew.
    """

    kept: float
    inputs: float
    layer: float

    def pass_bytes(self, num_tokens: int, *, recomputed: bool) -> int:
        """What a pass of so many tokens holds."""
        return int(num_tokens * (self.inputs + self.layer if recomputed else self.kept))


class SavedBytes:
    """Counts what autograd keeps within its context, weights aside, each tensor's memory once."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._apart = set(storages_of(weights))
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """So many so far."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def counting(self) -> saved_tensors_hooks:
        """The context."""
        return saved_tensors_hooks(self._take, lambda tensor: tensor)

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._apart:
            # Held, so that no other tensor gets its place.
            self._kept[place] = tensor.detach()
        return tensor


class ActivationBudget:
    """Says which passes keep their activations.

    Args:
        sizes: What passes keep.
        limit_bytes: What they may keep; None: a part of what can be had of the device's memory when it is asked.
        memory: Of the device that they are on.
    """

    def __init__(self, sizes: ActivationSizes, *, limit_bytes: int | None, memory: DeviceMemory) -> None:
        self.sizes = sizes
        self._limit_bytes = limit_bytes
        self._memory = memory
        self._most_tokens: int | None = None

    def wants_recomputation(self, num_tokens: int) -> bool:
        """Whether a pass of so many tokens must not keep its activations."""
        if self._most_tokens is not None and num_tokens > self._most_tokens:
            return True
        kept = self.sizes.pass_bytes(num_tokens, recomputed=False)
        limit = self._limit_bytes
        return kept > (self._memory.obtainable_bytes * FREE_PART if limit is None else limit)

    def did_not_fit(self, num_tokens: int) -> bool:
        """A pass of so many tokens ran out of memory; whether it is worth another try, which keeps nothing."""
        if self.wants_recomputation(num_tokens):
            return False
        self._most_tokens = num_tokens - 1
        return True
