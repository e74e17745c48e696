"""A pass whose low-rank products read each adapter's matrices where they lie, for GPUs (``lora_kernels``).

Layers that are given the same rows one after another, such as queries, keys and values, are a group: two launches
forward and three backward serve all its members. A member that no adapter of a row trains adds nothing to that row.

Shapes: M members of a group, T packed tokens, I inputs, O outputs, R padded rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from twinkle.module.adapter import LoraAdapter
from twinkle.module.expert_rows import Assignments
from twinkle.module.lora_tables import FixedTables, Places, Tables
from twinkle.module.packed_products import LayerUpdates, NoUpdates
from twinkle.module.segmented import RoutedPass, Segment
from twinkle.module.stacked import FixedExpertRoute, Group, groups_of

MOST_MEMBERS = 3
"""Of a group, as the kernels take them."""
A_SIDE, B_SIDE = 0, 1


class GroupUpdates:
    """The updates of a group of layers with the same rows; without tables nobody trains any of them.

    What it saves is ``scale * x A^T`` [M, T, R].
    """

    def __init__(self, tables: Tables | None, path: int) -> None:
        self._tables = tables
        self._path = path

    def add(self, ys_TO: Sequence[torch.Tensor], x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Add to each member's ``y`` in place; return what ``add_gradients`` needs."""
        if self._tables is None:
            return ()
        with self._tables.on_device:
            inner_MTR = self._tables.shrink([_by_rows(x_TI)] * len(ys_TO), self._path, A_SIDE)
            self._tables.expand(inner_MTR, ys_TO, self._path, B_SIDE)
        return (inner_MTR,)

    def add_gradients(
        self, dys_TO: Sequence[torch.Tensor], *, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """Add each row's share to ``dx`` and to the gradients of its owner's pairs, in place."""
        if self._tables is None:
            return
        (inner_MTR,) = saved
        dys_TO, x_TI = [_by_rows(dy_TO) for dy_TO in dys_TO], _by_rows(x_TI)
        with self._tables.on_device:
            d_inner_MTR = self._tables.shrink(dys_TO, self._path, B_SIDE)
            self._tables.add_outer(d_inner_MTR, inner_MTR, x_TI, dys_TO, self._path)
            self._tables.expand(d_inner_MTR, [dx_TI], self._path, A_SIDE)


class TabledUpdates:
    """The updates of one layer's rows."""

    def __init__(self, group: GroupUpdates) -> None:
        self._group = group

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`LayerUpdates`."""
        return self._group.add([y_TO], x_TI)

    def add_gradients(
        self, *, dy_TO: torch.Tensor, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """See :class:`LayerUpdates`."""
        self._group.add_gradients([dy_TO], dx_TI=dx_TI, x_TI=x_TI, saved=saved)


class PathRoute:
    """Who owns which packed tokens of a pass, of Linears whose updates are made by these kernels.

    Args:
        tables: Of the pass; none if nobody owns anything.
        places: Where each path's matrices lie.
        trained: The paths that some owner trains.
    """

    def __init__(self, tables: Tables | None, places: Places, trained: Collection[str]) -> None:
        self._tables = tables
        self._places = places
        self._trained = trained

    def updates(self, path: str) -> LayerUpdates:
        """See :class:`RoutedPass`."""
        if self._tables is None or path not in self._trained:
            return NoUpdates()
        return TabledUpdates(self.together([path]))

    def together(self, paths: Sequence[str]) -> GroupUpdates:
        """What the adapters add to Linears with the same rows, whose paths follow one another in ``places``."""
        is_trained = any(path in self._trained for path in paths)
        return GroupUpdates(self._tables if is_trained else None, self._places.number(paths[0]))


class TabledRoute(PathRoute):
    """Of a pass that is made once; experts go another way."""

    def __init__(
        self,
        segments: Sequence[Segment],
        num_rows: int,
        places: Places,
        *,
        kernels: Any,
        device: torch.device,
        others: Callable[[], RoutedPass],
    ) -> None:
        groups = groups_of(segments, num_rows)
        trained = {path for group in groups if group.adapter is not None for path in group.adapter.compute_views}
        super().__init__(Tables.of(groups, places, kernels, device) if trained else None, places, trained)
        self._others = others
        self._route_of_others: RoutedPass | None = None

    def assign(self, experts_TK: torch.Tensor, num_experts: int) -> Assignments:
        """See :class:`RoutedPass`."""
        if self._route_of_others is None:
            self._route_of_others = self._others()
        return self._route_of_others.assign(experts_TK, num_experts)


class FixedRoute(PathRoute):
    """Of a pass without gradients that is recorded once: each time owners are told anew.

    Args:
        num_rows: Packed tokens.
        rank: What the kernels take for the owners' largest; 0 if the base model is alone.
        places: Where each path's matrices lie.
        kernels: Those that read them.
        device: Where they are.
        experts: The same for layers of experts, where there are any.
    """

    def __init__(
        self,
        num_rows: int,
        rank: int,
        places: Places,
        *,
        kernels: Any,
        device: torch.device,
        experts: FixedExpertRoute | None,
    ) -> None:
        self._num_rows = num_rows
        self._experts = experts
        self._fixed = FixedTables(num_rows, rank, places, kernels, device) if rank else None
        self._told: list[tuple[weakref.ref[LoraAdapter] | None, int]] | None = None
        # Of a recorded pass no layer can be left out because nobody trains it now.
        super().__init__(None if self._fixed is None else self._fixed.tables, places, places)

    def tell(self, segments: Sequence[Segment]) -> None:
        """Send whose rows they are, unless they are whose they were."""
        groups = groups_of(segments, self._num_rows)
        if self._is_told(groups):
            return
        if self._fixed is not None:
            self._fixed.tell(groups)
        if self._experts is not None and segments:
            self._experts.tell(groups_of(segments, segments[-1].end))
        self._told = [(None if group.adapter is None else weakref.ref(group.adapter), group.end) for group in groups]

    def _is_told(self, groups: Sequence[Group]) -> bool:
        if self._told is None or len(self._told) != len(groups):
            return False
        pairs = zip(self._told, groups, strict=True)
        # One that is gone is nobody's adapter, and was somebody's.
        return all(
            end == group.end and (group.adapter is None if of is None else of() is group.adapter is not None)
            for (of, end), group in pairs
        )

    def assign(self, experts_TK: torch.Tensor, num_experts: int) -> Assignments:
        """See :class:`RoutedPass`."""
        assert self._experts is not None
        return self._experts.assign(experts_TK, num_experts)


def _by_rows(x_TF: torch.Tensor) -> torch.Tensor:
    return x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()
