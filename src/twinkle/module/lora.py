"""The LoRA pool: every trainable layer of the base model is replaced once, adapters come and go as data.

How rows of many adapters share a layer: ``segmented`` for a Linear, ``experts`` for a mixture of experts, ``stacked``
for both where a device has grouped products, ``tabled`` for a Linear where it has our kernels, which then serve Linears
with the same rows together (``shared_input``).

Shapes: T packed tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch

from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.infra.device_memory import DeviceMemory, unbounded
from twinkle.module.adapter import (
    AS_LOADED,
    AdapterLayout,
    LoraAdapter,
    LoraConfig,
    LoraShape,
    StoredPaths,
    TrainedModule,
)
from twinkle.module.experts import LoraExperts
from twinkle.module.grouped_products import fits_kernel, supports_grouped_products
from twinkle.module.lora_check import kernels_for
from twinkle.module.lora_tables import Places, padded_rank
from twinkle.module.packed_linear import PackedLinear
from twinkle.module.packed_products import LoopedProducts
from twinkle.module.row_product import RowProduct
from twinkle.module.segmented import Route, RoutedPass, Routing, Segment, SegmentedLinear
from twinkle.module.shared_input import SharedInputLinears, Weight, products, siblings_of
from twinkle.module.stacked import FixedExpertRoute, StackedRoute, groups_of, stack_of
from twinkle.module.stacks import AdapterStacks, Stack, StackShape
from twinkle.module.tabled import FixedRoute, PathRoute, TabledRoute
from twinkle.module.targets import Target, TargetKind, beside_experts

_log = event_log()

__all__ = ["LoraAdapter", "LoraConfig", "LoraLinear", "LoraPool", "Segment"]


class InPlace:
    """Routes of Linears whose adapters are read where they lie."""

    def __init__(self, places: Places, kernels: Any, device: torch.device) -> None:
        self._places, self._kernels, self._device = places, kernels, device

    def route(self, segments: Sequence[Segment], num_rows: int, others: Callable[[], RoutedPass]) -> TabledRoute:
        """Of one pass."""
        return TabledRoute(segments, num_rows, self._places, kernels=self._kernels, device=self._device, others=others)

    def fixed_route(self, num_rows: int, rank: int, experts: FixedExpertRoute | None) -> FixedRoute:
        """Of one that is recorded."""
        return FixedRoute(num_rows, rank, self._places, kernels=self._kernels, device=self._device, experts=experts)

    def padded_rank(self, adapters: Sequence[LoraAdapter]) -> int:
        """Of its kernels; 0 if nobody is there."""
        return padded_rank(adapters, self._places) if adapters else 0


class LoraLinear(torch.nn.Module):
    """Stands in for one frozen Linear and applies the routed adapters."""

    def __init__(self, base: torch.nn.Linear, path: str, routing: Routing) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.path = path
        self._routing = routing
        self._make = base.plain_weight if isinstance(base, PackedLinear) else None

        self.followers: tuple[LoraLinear, ...] = ()
        """Those that are given the same rows after this one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the frozen weight and the update of each routed segment."""
        of_rows, computed = self._routing.ahead.pop(self.path, (None, x))
        if of_rows is x:
            return computed
        route = self._routing.now
        if self.followers and isinstance(route, PathRoute):
            return self._with_followers(x, route)
        updates = route.updates(self.path)
        x_TI = x.reshape(-1, self.in_features)
        y_TO: torch.Tensor
        if torch.is_grad_enabled():
            y_TO = SegmentedLinear.apply(x_TI, self._weight, self.bias, self._routing.rows, updates)
        else:  # what ``apply`` adds is a tenth of a step that samples one token
            y_TO = self._routing.rows(x_TI, self._make() if self._make else self.weight, self.bias)
            updates.add(y_TO, x_TI)
        return y_TO.view(*x.shape[:-1], self.out_features)

    def _with_followers(self, x: torch.Tensor, route: PathRoute) -> torch.Tensor:
        linears = (self, *self.followers)
        updates = route.together([linear.path for linear in linears])
        weights, biases = [linear._weight for linear in linears], [linear.bias for linear in linears]
        x_TI = x.reshape(-1, self.in_features)
        ys_TO: Sequence[torch.Tensor]
        if torch.is_grad_enabled():
            ys_TO = SharedInputLinears.apply(x_TI, weights, biases, self._routing.rows, updates)
        else:
            ys_TO = products(x_TI, weights, biases, self._routing.rows)
            updates.add(ys_TO, x_TI)
        own, *others = (y_TO.view(*x.shape[:-1], y_TO.shape[1]) for y_TO in ys_TO)
        for linear, y in zip(self.followers, others, strict=True):
            self._routing.ahead[linear.path] = x, y
        return own

    @property
    def _weight(self) -> Weight:
        return self._make or self.weight


class LoraPool:
    """Turns the targets of a frozen model into layers that apply adapters, and makes adapters that fit them.

    The output projection stays as it is: its update is applied where logits are computed, since a whole ``[T, vocab]``
    is never kept, and since its weight may be the input embedding's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        targets: Sequence[Target],
        *,
        product: RowProduct,
        max_rank: int,
        paths: StoredPaths = AS_LOADED,
        device: torch.device | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.max_rank = max_rank
        self.product = product
        self.paths = paths
        """What modules are called in files."""
        self._targets = tuple(targets)
        self._device = device or targets[0].weight.device
        self._compute_dtype = targets[0].weight.dtype
        self._memory = memory or unbounded(self._device)
        self._memory.add("adapters", self)
        self._alive: WeakSet[LoraAdapter] = WeakSet()
        self._looped = LoopedProducts(product)
        self._routing = Routing(product, Route((), self._looped))
        self.stacks: AdapterStacks | None = None
        """What grouped products keep of adapters, where the device has these."""
        within = [target for target in targets if target.kind != "unembed"]
        self._has_experts = any(target.num_experts is not None for target in within)
        kernels = kernels_for(self._device.type, self._compute_dtype)
        self._in_place: InPlace | None = None
        shared: list[tuple[str, ...]] = []
        if kernels is not None:
            shared += siblings_of({target.path: target.in_features for target in within if target.num_experts is None})
            places = Places([path for siblings in shared for path in siblings])
            self._in_place = InPlace(places, kernels, self._device)
            within = [target for target in within if target.num_experts is not None]
        if _are_grouped(within, self._device, self._compute_dtype):
            self.stacks = AdapterStacks(
                {target.path: _stack_shape(target) for target in within},
                device=self._device,
                dtype=self._compute_dtype,
                room=lambda: self._memory.room_for_guests,
            )
            self._memory.add_guest("stacked adapters", self.stacks)
        for target in targets:
            if target.kind != "unembed" and target.module is model.get_submodule(target.module_path):
                parent, _, name = target.module_path.rpartition(".")
                setattr(model.get_submodule(parent), name, self._layer(target))
        for siblings in shared:
            first, *others = (cast(LoraLinear, model.get_submodule(path)) for path in siblings)
            first.followers = tuple(others)

    def _layer(self, target: Target) -> torch.nn.Module:
        if isinstance(target.module, torch.nn.Linear):
            return LoraLinear(target.module, target.path, self._routing)
        assert target.form is not None
        return LoraExperts(target.module, target.module_path, target.form, self._routing)

    @property
    def unembed_path(self) -> str:
        """The path of the output projection."""
        return next(target.path for target in self._targets if target.kind == "unembed")

    @property
    def targets(self) -> tuple[Target, ...]:
        """What adapters can train, in the order in which an adapter's buffers hold it."""
        return self._targets

    def release_weights(self, model: torch.nn.Module) -> None:
        """Keep the shapes of the layers' weights only, so that they can be taken apart: the layers own them alone."""
        self._targets = tuple(
            target
            if target.kind == "unembed"
            else replace(target, module=model.get_submodule(target.module_path), weight=target.weight.to("meta"))
            for target in self._targets
        )

    @property
    def sizes(self) -> AdapterSizes:
        """How large the adapters are that it makes."""
        of_kind = Counter[TargetKind]()
        for target in self._targets:
            of_kind[target.kind] += (target.num_experts or 1) * (target.in_features + target.out_features)
        copied = self._compute_dtype != torch.float32
        return AdapterSizes(
            attn=of_kind["attn"],
            mlp=of_kind["mlp"],
            unembed=of_kind["unembed"],
            copy_bytes=self._compute_dtype.itemsize if copied else 0,
        )

    def layout(self, config: LoraConfig) -> AdapterLayout:
        """Which modules an adapter of this config trains, and where their weights lie."""
        config.check(self.max_rank)
        return AdapterLayout(
            tuple(shapes_of(self._targets, config)), beside_experts=beside_experts(self._targets), paths=self.paths
        )

    def create(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """A fresh adapter whose weights depend on nothing but its config."""
        adapter = self.create_empty(config, trainable=trainable)
        adapter.initialize()
        return adapter

    def create_empty(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """An adapter of zeros, to be filled from a file."""
        layout = self.layout(config)
        sizes = self.sizes
        # What is there only to be quick gives way first.
        self._memory.make_room((sizes.trained_bytes if trainable else sizes.sampled_bytes)(layout.numel))
        adapter = LoraAdapter(
            config, layout, device=self._device, compute_dtype=self._compute_dtype, trainable=trainable
        )
        self._alive.add(adapter)
        return adapter

    @property
    def size_bytes(self) -> int:
        """What all adapters that there are hold of the device's memory."""
        return sum(adapter.size_bytes for adapter in self._alive)

    def release_stacks(self) -> None:
        """Give back memory that is kept to be quick."""
        if self.stacks is not None:
            self.stacks.clear()

    def route(self, segments: Sequence[Segment], num_rows: int, *, beside_bytes: int = 0) -> RoutedPass:
        """Tell the layers of a pass over so many packed tokens which of them goes through which adapter.

        The pass is about to take ``beside_bytes`` of the device's memory.
        """
        others = partial(self._route_of_others, segments, num_rows, beside_bytes)
        return others() if self._in_place is None else self._in_place.route(segments, num_rows, others)

    @property
    def can_be_recorded(self) -> bool:
        """Whether no layer waits for the host or asks it whose rows are whose, so that a pass can be recorded."""
        return self._in_place is not None and (self.stacks is not None or not self._has_experts)

    def stack_of_experts(self, segments: Sequence[Segment]) -> Stack | None:
        """What these owners' experts are read from, with the weights that they have now; none without experts."""
        if self.stacks is None or not self._has_experts:
            return None
        return stack_of(groups_of(segments, segments[-1].end), self.stacks)

    def padded_rank(self, adapters: Iterable[LoraAdapter | None]) -> int:
        """The ``rank`` of a :meth:`fixed_route` for these adapters; 0 if there is none among them."""
        assert self._in_place is not None
        return self._in_place.padded_rank([adapter for adapter in adapters if adapter is not None])

    def fixed_route(self, num_rows: int, rank: int, segments: Sequence[Segment], stack: Stack | None) -> FixedRoute:
        """The route of passes without gradients that are one record; only where ``can_be_recorded``.

        Their owners may be others than those of ``segments``, but for the padded rank and the stack of experts.
        """
        assert self._in_place is not None
        groups = groups_of(segments, segments[-1].end)
        experts = FixedExpertRoute(num_rows, groups, stack, self._device) if self._has_experts else None
        return self._in_place.fixed_route(num_rows, rank, experts)

    @property
    def sums_neighbours(self) -> bool:
        """Whether neighbouring rows of one adapter are one sum, whose last bits depend on how many there are."""
        return self.stacks is not None or self._in_place is not None

    def _route_of_others(self, segments: Sequence[Segment], num_rows: int, beside_bytes: int) -> RoutedPass:
        """Of layers that no kernels read in place."""
        if self.stacks is None:
            return Route(segments, self._looped)
        return StackedRoute(
            segments, num_rows, self.stacks, self._device, looped=self._looped, beside_bytes=beside_bytes
        )

    @contextmanager
    def routed(self, route: RoutedPass) -> Iterator[None]:
        """Within this context a forward pass goes that way.

        Activations that are computed anew for a backward pass go the same way again, within the same context.
        """
        if self._routing.now is not self._routing.idle:
            raise RuntimeError("a pass is already routed; the pool runs one pass at a time")
        self._routing.now = route
        try:
            yield
        finally:
            self._routing.now = self._routing.idle
            self._routing.ahead.clear()


def _are_grouped(targets: Sequence[Target], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether grouped products do the updates; single Linears of odd sizes may be left out, experts may not."""
    if not supports_grouped_products(device, dtype):
        return False
    for target in targets:
        sizes = (target.in_features, target.out_features)
        if target.num_experts and not all(fits_kernel(size, dtype) for size in sizes):
            _log.warning("device.experts_not_grouped", path=target.path, next="products are made one by one, slower")
            return False
    return True


def _stack_shape(target: Target) -> StackShape:
    return StackShape(target.in_features, target.out_features, target.num_experts)


def shapes_of(targets: Sequence[Target], config: LoraConfig) -> Iterator[LoraShape]:
    """The pairs that an adapter of this config has, in the order of its targets."""
    trained: Mapping[TargetKind, bool] = {
        "attn": config.train_attn,
        "mlp": config.train_mlp,
        "unembed": config.train_unembed,
    }
    if config.modules is None:
        chosen = {t.path: TrainedModule(t.path, config.rank, config.alpha) for t in targets if trained[t.kind]}
    else:
        chosen = {module.path: module for module in config.modules}
        unknown = sorted(chosen.keys() - {target.path for target in targets})
        if unknown:
            raise InvalidInput("lora_config.modules", f"{unknown[0]} is not a layer of this model that can be trained")
    for target in targets:
        if target.path in chosen:
            module = chosen[target.path]
            scale = config.scale(module.rank, module.alpha)
            num_experts = target.num_experts
            yield LoraShape(
                target.path,
                target.in_features,
                target.out_features,
                module.rank,
                scale,
                num_experts,
                is_swapped=target.form is not None and target.form.peft_swaps,
            )
