"""All of a model's parameters as one adapter: the same flat buffers, in which the model's own parameters lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from weakref import WeakSet

import torch

from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.module.adapter import AS_LOADED, AdapterLayout, LoraAdapter, LoraConfig
from twinkle.module.targets import Target

WHOLE = LoraConfig(rank=0)
"""What there is to configure of it: nothing."""


class WholeLayout(AdapterLayout):
    """Where each parameter of a model lies in a flat buffer: one after another, in the model's order."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(())
        self._shapes = dict(shapes)
        self.numel = sum(shape.numel() for shape in self._shapes.values())

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters of a flat buffer, by the model's names, in their place."""
        ends = [0]
        for shape in self._shapes.values():
            ends.append(ends[-1] + shape.numel())
        return {
            name: buffer[start:end].view(shape)
            for (name, shape), (start, end) in zip(self._shapes.items(), pairwise(ends), strict=True)
        }


class WholePool:
    """Makes copies of a model's parameters to be trained, and lends them to the model for a pass.

    The model's own values are taken over into one buffer, ``base``, which is never changed.

    Args:
        model: Its parameters become views of ``base``, all of them in float32.
    """

    targets: tuple[Target, ...] = ()
    """No layer has an adapter."""
    paths = AS_LOADED
    sizes = AdapterSizes(attn=0, mlp=0, unembed=0)

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self.layout = WholeLayout({name: parameter.shape for name, parameter in self._parameters.items()})
        self._alive: WeakSet[LoraAdapter] = WeakSet()
        self._device = next(iter(self._parameters.values())).device
        self.base = self.create_empty(WHOLE, trainable=False)
        for name, values in self.layout.tensors(self.base.params).items():
            values.copy_(self._parameters[name].detach())
            self._parameters[name].data = values
        self.base.publish()

    def create(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """The parameters as they were loaded."""
        adapter = self.create_empty(config, trainable=trainable)
        adapter.params.copy_(self.base.params)
        adapter.publish()
        return adapter

    def create_empty(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """One whose parameters are all zero, for a caller that fills them."""
        adapter = LoraAdapter(
            config, self.layout, device=self._device, compute_dtype=torch.float32, trainable=trainable
        )
        self._alive.add(adapter)
        return adapter

    @property
    def size_bytes(self) -> int:
        """What all copies hold of the device's memory, the model's own values aside."""
        return sum(adapter.size_bytes for adapter in self._alive if adapter is not self.base)

    @contextmanager
    def lent(self, adapter: LoraAdapter, gradient: torch.Tensor | None = None) -> Iterator[None]:
        """Within, the model computes with these parameters; what a backward pass finds is added to ``gradient``."""
        gradients = {} if gradient is None else self.layout.tensors(gradient)
        try:
            self._lend(self.layout.tensors(adapter.params), gradients)
            yield
        finally:
            self._lend(self.layout.tensors(self.base.params), {})

    def _lend(self, values: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            parameter.data = values[name]
            parameter.grad = gradients.get(name)
