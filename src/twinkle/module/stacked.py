"""A pass whose low-rank products are made in a few grouped kernels, for devices that launches keep waiting.

Neighbouring segments of one adapter are one group, and so are rows that nobody owns: two products forward and four
backward do for all tenants of a layer, however many they are. A group's rows meet no other group's weights. Who owns
which row is told to the device once a pass, and no layer waits for an answer from it.

Sums over tokens run over a whole group, so the last bits of a gradient may depend on how many datums a job brought to a
pass; the ``mkl-strict`` and ``tiled`` promises are kept by ``LoopedProducts`` alone.

Shapes: T packed tokens, K experts a token, A = T * K assignments of tokens to experts, G groups, E experts, I inputs,
O outputs, R padded rank, D unlike factors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from twinkle.infra.sending import FixedParcel, send
from twinkle.module.adapter import LoraAdapter, LoraPair
from twinkle.module.expert_rows import Assignments
from twinkle.module.grouped_products import rows_by_group, sums_by_group
from twinkle.module.packed_products import LayerUpdates, LoopedProducts, NoUpdates
from twinkle.module.segmented import Route, Segment
from twinkle.module.stacks import AdapterStacks, Stack


@dataclass(frozen=True, eq=False)
class Group:
    """Rows up to ``end`` that share an adapter and the place of its gradient."""

    adapter: LoraAdapter | None
    gradient: Mapping[str, LoraPair] | None
    end: int

    def scale(self, path: str) -> float:
        """The factor of the update of a module; of none it does not matter."""
        return 0.0 if self.adapter is None else self.adapter.scales.get(path, 0.0)


def groups_of(segments: Sequence[Segment], num_rows: int) -> tuple[Group, ...]:
    """The groups of all rows of a pass, in order; what no segment covers is nobody's."""
    groups: list[Group] = []

    def add(adapter: LoraAdapter | None, gradient: Mapping[str, LoraPair] | None, end: int) -> None:
        if groups and groups[-1].adapter is adapter and groups[-1].gradient is gradient:
            groups[-1] = replace(groups[-1], end=end)
        else:
            groups.append(Group(adapter, gradient, end))

    end = 0
    for segment in segments:
        if segment.start > end:
            add(None, None, segment.start)
        gradient = None if segment.adapter is None else segment.gradient
        add(segment.adapter, gradient, segment.end)
        end = segment.end
    if end < num_rows:
        add(None, None, num_rows)
    return tuple(groups)


def stack_of(groups: Sequence[Group], stacks: AdapterStacks, *, beside_bytes: int = 0) -> Stack | None:
    """The matrices of these owners with the weights that they have now; none if nobody has any."""
    owners = [group.adapter for group in groups]
    return None if all(owner is None for owner in owners) else stacks.of(owners, beside_bytes=beside_bytes)


class ExpertRoute:
    """Who owns which packed tokens of a pass, in layers of experts.

    Args:
        groups: The owners, in order.
        stack: Gives their matrices; none if nobody has any.
        ends: Where each group ends [G], in int32.
        group: The group of each token [T].
    """

    def __init__(
        self,
        groups: Sequence[Group],
        stack: Callable[[], Stack | None],
        *,
        ends: torch.Tensor,
        group: torch.Tensor,
    ) -> None:
        self._groups = groups
        self._stack = stack
        self._ends_G = ends
        self._group_T = group

    def assign(self, experts_TK: torch.Tensor, num_experts: int) -> Assignments:
        """See :class:`RoutedPass`."""
        return StackedAssignments(experts_TK, num_experts, self)

    def expert_updates(self, path: str, ends_EG: torch.Tensor, tokens_A: torch.Tensor) -> LayerUpdates:
        """What the adapters add to rows that are sorted by expert, then by group."""
        stack = self._stack()
        if stack is None or not stack.trains(path):
            return NoUpdates()
        scales_A1 = self._scales(path).index_select(0, tokens_A)
        return StackedUpdates(path, self._groups, stack, ends=ends_EG, scales=scales_A1)

    @property
    def group_T(self) -> torch.Tensor:
        """The group of each token."""
        return self._group_T

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self._groups)

    def _scales(self, path: str) -> torch.Tensor:
        """The factor of each row's group [T, 1], in float32."""
        raise NotImplementedError


class StackedRoute(ExpertRoute):
    """Of a pass that is made once, for Linears too; a layer that grouped products do not take is looped over."""

    def __init__(
        self,
        segments: Sequence[Segment],
        num_rows: int,
        stacks: AdapterStacks,
        device: torch.device,
        *,
        looped: LoopedProducts,
        beside_bytes: int = 0,
    ) -> None:
        self._stacks = stacks
        self._others = Route(segments, looped)
        self._device = device
        self._scales_T1: dict[tuple[float, ...], torch.Tensor] = {}
        groups = groups_of(segments, num_rows)
        ends = [group.end for group in groups]
        lengths = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        ends_G = send(ends, torch.int32, device)
        lengths_G = send(lengths, torch.int64, device)
        group_T = torch.arange(len(ends), device=device).repeat_interleave(lengths_G, output_size=num_rows)
        stack = stack_of(groups, stacks, beside_bytes=beside_bytes)
        super().__init__(groups, lambda: stack, ends=ends_G, group=group_T)

    def updates(self, path: str) -> LayerUpdates:
        """See :class:`RoutedPass`."""
        if not self._stacks.take(path):
            return self._others.updates(path)
        stack = self._stack()
        if stack is None or not stack.trains(path):
            return NoUpdates()
        return StackedUpdates(path, self._groups, stack, ends=self._ends_G, scales=self._scales(path))

    def _scales(self, path: str) -> torch.Tensor:
        """Most modules share them."""
        scales = tuple(group.scale(path) for group in self._groups)
        if scales not in self._scales_T1:
            scales_G = send(scales, torch.float32, self._device)
            self._scales_T1[scales] = scales_G.index_select(0, self._group_T)[:, None]
        return self._scales_T1[scales]


class FixedExpertRoute(ExpertRoute):
    """Of a pass without gradients that is recorded once, for these owners in this order and their stack.

    How many rows each has is told anew between two runs of it; rows behind them all go with the last owner.
    """

    def __init__(self, num_rows: int, groups: Sequence[Group], stack: Stack | None, device: torch.device) -> None:
        paths = [] if stack is None else stack.paths
        self._scales_of = {path: tuple(group.scale(path) for group in groups) for path in paths}
        self._distinct = list(dict.fromkeys(self._scales_of.values()))
        self._num_rows = num_rows
        self._parcel = FixedParcel(
            [
                ((len(groups),), torch.int32),
                ((num_rows,), torch.int64),
                ((len(self._distinct), num_rows, 1), torch.float32),
            ],
            device,
        )
        ends_G, group_T, self._rows_DT1 = self._parcel.tensors
        # Nothing is held that others may give up: what was recorded for a stack is not run again without it.
        found: Callable[[], Stack | None] = (lambda: None) if stack is None else weakref.ref(stack)
        super().__init__([replace(group, adapter=None) for group in groups], found, ends=ends_G, group=group_T)
        self.tell([replace(group, end=0) for group in groups])

    def _scales(self, path: str) -> torch.Tensor:
        return self._rows_DT1[self._distinct.index(self._scales_of[path])]

    def tell(self, groups: Sequence[Group]) -> None:
        """Send how many rows each has."""
        ends_G = np.array([group.end for group in groups], np.int32)
        ends_G[-1] = self._num_rows
        group_T = np.repeat(np.arange(len(groups)), np.diff(ends_G, prepend=0))
        scales_DT1 = np.array(self._distinct, np.float32).reshape(-1, len(groups))[:, group_T, None]
        self._parcel.send([ends_G, group_T, scales_DT1])


class StackedUpdates:
    """The updates of one layer's rows. What it saves is ``scale * x A^T`` [rows, R] of all."""

    def __init__(
        self, path: str, groups: Sequence[Group], stack: Stack, *, ends: torch.Tensor, scales: torch.Tensor
    ) -> None:
        self._path = path
        self._groups = groups
        # Not its matrices: where these are stacked for this layer alone, nothing is to hold them until the way back.
        self._stack = stack
        self._ends_G = ends
        self._scales_T1 = scales

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`LayerUpdates`."""
        pair = self._stack.pair(self._path)
        inner_TR = self._scaled(rows_by_group(x_TI, pair.a.transpose(1, 2), self._ends_G))
        y_TO.add_(rows_by_group(inner_TR, pair.b.transpose(1, 2), self._ends_G))
        return (inner_TR,)

    def add_gradients(
        self, *, dy_TO: torch.Tensor, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """See :class:`LayerUpdates`."""
        (inner_TR,) = saved
        pair = self._stack.pair(self._path)
        dy_TO = dy_TO.contiguous()
        d_inner_TR = self._scaled(rows_by_group(dy_TO, pair.b, self._ends_G))
        if any(group.gradient is not None and self._path in group.gradient for group in self._groups):
            self._add_to_pairs(
                sums_by_group(d_inner_TR, x_TI, self._ends_G).float(),
                sums_by_group(dy_TO, inner_TR, self._ends_G).float(),
            )
        dx_TI.add_(rows_by_group(d_inner_TR, pair.a, self._ends_G))

    def _scaled(self, inner_TR: torch.Tensor) -> torch.Tensor:
        """Rows times their group's factor, rounded once: a factor in bfloat16 would be off by up to 0.2 % for all."""
        return (inner_TR * self._scales_T1).to(inner_TR.dtype)

    def _add_to_pairs(self, d_a_GRI: torch.Tensor, d_b_GOR: torch.Tensor) -> None:
        """Add each group's gradient to where its segments want it, group after group where two share a place."""
        totals: list[torch.Tensor] = []
        shares: list[torch.Tensor] = []
        taken: set[int] = set()
        for index, group in enumerate(self._groups):
            if group.gradient is None or self._path not in group.gradient:
                continue
            if id(group.gradient) in taken:
                torch._foreach_add_(totals, shares)
                totals, shares, taken = [], [], set()
            taken.add(id(group.gradient))
            gradient = group.gradient[self._path]
            rank = gradient.a.shape[-2]
            num_groups = len(self._groups)
            totals += gradient
            if gradient.a.dim() == 2:
                shares += (d_a_GRI[index, :rank], d_b_GOR[index, :, :rank])
            else:
                shares += (d_a_GRI[index::num_groups, :rank], d_b_GOR[index::num_groups, :, :rank])
        if totals:
            torch._foreach_add_(totals, shares)


class StackedAssignments:
    """Sorted on the device, by expert and within it by token, which is by group."""

    def __init__(self, experts_TK: torch.Tensor, num_experts: int, route: ExpertRoute) -> None:
        num_tokens, num_choices = experts_TK.shape
        chosen_A = experts_TK.reshape(-1)
        device = chosen_A.device
        self._route = route
        self.order_A = torch.argsort(chosen_A, stable=True)
        places_A = torch.empty_like(self.order_A)
        places_A.scatter_(0, self.order_A, torch.arange(chosen_A.numel(), device=device))
        self.places_TK = places_A.view(num_tokens, num_choices)
        self.tokens_A = self.order_A // num_choices
        self.experts_A = chosen_A.index_select(0, self.order_A)
        places_EG = torch.arange(num_experts * route.num_groups, device=device)
        keys_A = self.experts_A * route.num_groups + route.group_T.index_select(0, self.tokens_A)
        self._ends_EG = torch.searchsorted(keys_A, places_EG, right=True, out_int32=True)

    def by_expert(self, x_AI: torch.Tensor, weight_EOI: torch.Tensor) -> torch.Tensor:
        """See :class:`Assignments`."""
        num_groups = self._route.num_groups
        return rows_by_group(x_AI, weight_EOI.transpose(1, 2), self._ends_EG[num_groups - 1 :: num_groups].contiguous())

    def updates(self, path: str) -> LayerUpdates:
        """See :class:`Assignments`."""
        return self._route.expert_updates(path, self._ends_EG, self.tokens_A)
