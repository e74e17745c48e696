"""One tenant's LoRA state: flat float32 buffers and the per-module views into them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch

from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.errors import InvalidInput
from twinkle.module.targets import Target

SEED_LIMIT = 2**63


@dataclass(frozen=True)
class TrainedModule:
    """One module of an adapter that was made elsewhere, with the rank and alpha it has there."""

    path: str
    rank: int
    alpha: float


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What a tenant asks for when it creates an adapter.

    The update is scaled by ``alpha / rank``, or by ``alpha / sqrt(rank)`` with ``use_rslora`` (rank-stabilized LoRA,
    arXiv 2312.03732). ``modules`` lists what an adapter made elsewhere trains; None means all modules of the trained
    kinds, each with ``rank`` and ``alpha``.
    """

    rank: int
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int = 0
    use_rslora: bool = False
    modules: tuple[TrainedModule, ...] | None = None

    def scale(self, rank: int, alpha: float) -> float:
        """The factor in front of ``B A`` of a module."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check(self, max_rank: int) -> None:
        """Raise ``InvalidInput`` when no adapter can be made of this."""
        _check_rank("lora_config", self.rank, self.alpha, max_rank)
        for module in self.modules or ():
            _check_rank(f"lora_config.modules[{module.path}]", module.rank, module.alpha, max_rank)
        if self.modules == () or not (self.train_attn or self.train_mlp or self.train_unembed):
            raise InvalidInput("lora_config", "trains nothing; set train_attn, train_mlp or train_unembed")
        if not -SEED_LIMIT <= self.seed < SEED_LIMIT:
            raise InvalidInput("lora_config.seed", "must fit in 64 bits")

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The config that ``to_json`` wrote.

        Raises:
            TypeError: A field is missing or unknown.
        """
        listed = fields.get("modules")
        modules = None if listed is None else tuple(TrainedModule(**module) for module in listed)
        return cls(**{**fields, "modules": modules})


def _check_rank(field: str, rank: int, alpha: float, max_rank: int) -> None:
    if not 1 <= rank <= max_rank:
        raise InvalidInput(f"{field}.rank", f"is {rank}, must be between 1 and {max_rank}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise InvalidInput(f"{field}.alpha", f"is {alpha}, must be a positive number")


class LoraPair(NamedTuple):
    """The two matrices of one module: ``a`` [rank, in] and ``b`` [out, rank].

    Fused experts have a pair each: ``a`` [experts, rank, in] and ``b`` [experts, out, rank].
    """

    a: torch.Tensor
    b: torch.Tensor

    def expert(self, index: int) -> LoraPair:
        """The pair of one expert."""
        return LoraPair(self.a[index], self.b[index])


@dataclass(frozen=True)
class LoraShape:
    """How large the pair of one module is, and the factor in front of it; ``num_experts`` None means one pair.

    ``is_swapped``: PEFT, which takes the inputs of these experts for outputs, calls ``b`` what is ``a`` here.
    """

    path: str
    in_features: int
    out_features: int
    rank: int
    scale: float
    num_experts: int | None = None
    is_swapped: bool = False

    @property
    def numel_a(self) -> int:
        """Elements of ``a``."""
        return (self.num_experts or 1) * self.rank * self.in_features

    @property
    def numel_b(self) -> int:
        """Elements of ``b``."""
        return (self.num_experts or 1) * self.rank * self.out_features


@dataclass(frozen=True)
class StoredPaths:
    """What the modules of a model are called in files: by the names of the class that is published.

    Where that class holds more than the language model, which alone is loaded, paths below ``loaded`` are stored below
    ``published``. A wrong name would be no error elsewhere: other tools serve the bare model with a warning.
    """

    loaded: str = ""
    published: str = ""

    def stored(self, path: str) -> str:
        """The name in files of a path in the loaded model; what has it already keeps it."""
        if self.loaded == self.published or path.startswith(self.published) or not path.startswith(self.loaded):
            return path
        return self.published + path.removeprefix(self.loaded)

    def within(self, path: str) -> str:
        """The path in the loaded model of a name in files."""
        return self.loaded + path.removeprefix(self.published) if path.startswith(self.published) else path


AS_LOADED = StoredPaths()


class AdapterLayout:
    """Where each module's pair lies in the flat buffers of an adapter: A then B, module after module.

    ``beside_experts`` are the paths of Linears in the MLPs of a model that has fused experts too, ``paths`` says what
    modules are called in files.
    """

    def __init__(
        self,
        shapes: tuple[LoraShape, ...],
        *,
        beside_experts: frozenset[str] = frozenset(),
        paths: StoredPaths = AS_LOADED,
    ) -> None:
        self.shapes = shapes
        self.paths = paths
        self.beside_experts = beside_experts
        self.starts: dict[str, tuple[LoraShape, int]] = {}
        """Of each module its shape, and where its A begins."""
        self.numel = 0
        for shape in shapes:
            self.starts[shape.path] = (shape, self.numel)
            self.numel += shape.numel_a + shape.numel_b

    def views(self, buffer: torch.Tensor) -> dict[str, LoraPair]:
        """The pairs of a flat buffer, by module path."""
        return {path: self.pair(buffer, path) for path in self.starts}

    def pair(self, buffer: torch.Tensor, path: str) -> LoraPair:
        """That of one module."""
        shape, start = self.starts[path]
        experts = () if shape.num_experts is None else (shape.num_experts,)
        middle = start + shape.numel_a
        a = buffer[start:middle].view(*experts, shape.rank, shape.in_features)
        b = buffer[middle : middle + shape.numel_b].view(*experts, shape.out_features, shape.rank)
        return LoraPair(a, b)


class PairsOnDemand(Mapping[str, LoraPair]):
    """The pairs of a flat buffer that lives for one call, each made when it is first looked at.

    Where kernels find matrices by address, that is two of hundreds.
    """

    def __init__(self, layout: AdapterLayout, buffer: torch.Tensor) -> None:
        self._layout = layout
        self._buffer = buffer
        self._made: dict[str, LoraPair] = {}

    def __getitem__(self, path: str) -> LoraPair:
        pair = self._made.get(path)
        if pair is None:
            pair = self._made[path] = self._layout.pair(self._buffer, path)
        return pair

    def __contains__(self, path: object) -> bool:
        return path in self._layout.starts

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.starts)

    def __len__(self) -> int:
        return len(self._layout.starts)


class Measure(NamedTuple):
    """A sum of what was measured, and of how many."""

    total: float
    number: int

    @property
    def mean(self) -> float:
        """Of one of them."""
        return self.total / max(1, self.number)


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
        self.scales: Mapping[str, float] = {shape.path: shape.scale for shape in layout.shapes}
        self.step = 0
        self.has_gradients = False
        self.measures: dict[str, Measure] = {}
        """Of the batches whose gradients are accumulated, by name."""
        self.version = object()
        """Another one whenever the weights are others."""
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

    @property
    def address(self) -> int:
        """Where the flat buffer begins that a forward pass reads."""
        return self._compute.data_ptr()

    def initialize(self) -> None:
        """Draw A from the config's seed alone (kaiming uniform with a = sqrt 5) and set B to zero."""
        generator = torch.Generator().manual_seed(self.config.seed)
        # On the host, whatever the device, which gets it in one copy.
        drawn = self.params if self.params.device.type == "cpu" else torch.empty(self.layout.numel, dtype=torch.float32)
        views = self.layout.views(drawn)
        for shape in self.layout.shapes:
            pair = views[shape.path]
            a = torch.empty(shape.numel_a // shape.in_features, shape.in_features)
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            pair.a.copy_(a.view(pair.a.shape))
            pair.b.zero_()
        if drawn is not self.params:
            self.params.copy_(drawn)
        self.publish()

    def publish(self) -> None:
        """Make changed ``params`` visible: by a new version, and to a forward pass that computes in another dtype."""
        self.version = object()
        if not self._same_dtype:
            self._compute.copy_(self.params)

    def measure(self, found: Mapping[str, Measure]) -> None:
        """Count what was measured of a batch, whose gradient is accumulated."""
        for name, (total, number) in found.items():
            before = self.measures.get(name, Measure(0.0, 0))
            self.measures[name] = Measure(before.total + total, before.number + number)

    def clear_gradients(self) -> None:
        """Empty the accumulation window."""
        if self.has_gradients:
            self.grad.zero_()
        self.has_gradients = False
        self.measures = {}


class AdapterPool(Protocol):
    """What makes adapters that fit one model."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """What adapters can train, in the order in which an adapter's buffers hold it."""
        ...

    @property
    def paths(self) -> StoredPaths:
        """What modules are called in files."""
        ...

    @property
    def sizes(self) -> AdapterSizes:
        """How large the adapters are that it makes."""
        ...

    @property
    def size_bytes(self) -> int:
        """What those that there are hold of the device's memory."""
        ...

    def create_empty(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """One of zeros, to be filled."""
        ...
