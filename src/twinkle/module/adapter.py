"""One tenant's LoRA state: flat float32 buffers and the per-module views into them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from twinkle.core.errors import InvalidInput

SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What a tenant asks for when it creates an adapter; the update is scaled by ``alpha / rank``."""

    rank: int
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int = 0

    @property
    def scale(self) -> float:
        """The factor in front of ``B A``."""
        return self.alpha / self.rank

    def check(self, max_rank: int) -> None:
        """Raise ``InvalidInput`` when no adapter can be made of this."""
        if not 1 <= self.rank <= max_rank:
            raise InvalidInput("lora_config.rank", f"is {self.rank}, must be between 1 and {max_rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InvalidInput("lora_config.alpha", f"is {self.alpha}, must be a positive number")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise InvalidInput("lora_config", "trains nothing; set train_attn, train_mlp or train_unembed")
        if not -SEED_LIMIT <= self.seed < SEED_LIMIT:
            raise InvalidInput("lora_config.seed", "must fit in 64 bits")


class LoraPair(NamedTuple):
    """The two matrices of one module: ``a`` [rank, in] and ``b`` [out, rank]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class LoraShape:
    """How large the pair of one module is."""

    path: str
    in_features: int
    out_features: int


class AdapterLayout:
    """Where each module's pair lies in the flat buffers of an adapter: A then B, module after module."""

    def __init__(self, shapes: tuple[LoraShape, ...], rank: int) -> None:
        self.shapes = shapes
        self.rank = rank
        self.numel = sum(rank * (shape.in_features + shape.out_features) for shape in shapes)

    def views(self, buffer: torch.Tensor) -> dict[str, LoraPair]:
        """The pairs of a flat buffer, by module path."""
        pairs: dict[str, LoraPair] = {}
        offset = 0
        for shape in self.shapes:
            size_a, size_b = self.rank * shape.in_features, self.rank * shape.out_features
            a = buffer[offset : offset + size_a].view(self.rank, shape.in_features)
            b = buffer[offset + size_a : offset + size_a + size_b].view(shape.out_features, self.rank)
            pairs[shape.path] = LoraPair(a, b)
            offset += size_a + size_b
        return pairs


class LoraAdapter:
    """One tenant's weights, gradient and Adam moments, each one flat float32 buffer.

    Invariant: while ``has_gradients`` is false, ``grad`` is all zeros. An adapter that is not trainable (sampling only)
    owns ``params`` alone.
    """

    def __init__(
        self,
        config: LoraConfig,
        layout: AdapterLayout,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        trainable: bool,
    ) -> None:
        self.config = config
        self.layout = layout
        self.trainable = trainable
        self.scale = config.scale
        self.step = 0
        self.has_gradients = False
        self.params = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.views: Mapping[str, LoraPair] = layout.views(self.params)
        self._same_dtype = compute_dtype == torch.float32
        self._compute = self.params if self._same_dtype else self.params.to(compute_dtype)
        self.compute_views: Mapping[str, LoraPair] = self.views if self._same_dtype else layout.views(self._compute)
        num_state = layout.numel if trainable else 0
        self.grad = torch.zeros(num_state, dtype=torch.float32, device=device)
        self.exp_avg = torch.zeros(num_state, dtype=torch.float32, device=device)
        self.exp_avg_sq = torch.zeros(num_state, dtype=torch.float32, device=device)
        self.grad_views: Mapping[str, LoraPair] = layout.views(self.grad) if trainable else {}

    @property
    def size_bytes(self) -> int:
        """Memory this adapter holds on its device."""
        buffers = [self.params, self.grad, self.exp_avg, self.exp_avg_sq]
        if not self._same_dtype:
            buffers.append(self._compute)
        return sum(buffer.nbytes for buffer in buffers)

    def initialize(self) -> None:
        """Draw A from the config's seed alone (kaiming uniform with a = sqrt 5) and set B to zero."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for shape in self.layout.shapes:
            a = torch.empty(self.config.rank, shape.in_features)
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            self.views[shape.path].a.copy_(a)
            self.views[shape.path].b.zero_()
        self.publish()

    def publish(self) -> None:
        """Make changed ``params`` visible to the forward pass where that computes in another dtype."""
        if not self._same_dtype:
            self._compute.copy_(self.params)

    def clear_gradients(self) -> None:
        """Empty the accumulation window."""
        if self.has_gradients:
            self.grad.zero_()
        self.has_gradients = False
