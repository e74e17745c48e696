"""A pass whose low-rank products read each adapter's matrices where they lie, for GPUs (``lora_kernels``).

What the kernels need to know of a pass, which rows are whose and where whose matrices begin, goes to the device in one
table at its start; no layer waits for an answer from it.

Shapes: T packed tokens, N tiles of rows, G groups, P paths, U takers of gradients, M ranges of rows, I inputs,
O outputs, R padded rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from twinkle.core.events import event_log
from twinkle.infra.sending import Parcel, send
from twinkle.module.adapter import AdapterLayout, LoraAdapter, LoraConfig, LoraPair, LoraShape
from twinkle.module.expert_rows import Assignments
from twinkle.module.packed_products import LayerUpdates, NoUpdates
from twinkle.module.segmented import RoutedPass, Segment
from twinkle.module.stacked import Group, groups_of
from twinkle.module.varlen import is_quick

MODULE = "twinkle.module.lora_kernels"
KERNELS_FROM = "triton"
A_SIDE, B_SIDE = 0, 1
LEAST_SIDE = 16
"""Of a block that is multiplied."""
ROWS_OF_TILE = 64
FEATURES_OF_BLOCK = 64
FEATURES_OF_SUM = 32
"""Of one sum over rows: few, since there is no other way to share out the rows."""
WIDE_RANK = 128
"""From here on a block's shared memory holds fewer rows, and fewer stages of them."""
TOLERANCE = 0.02
"""Relative, of products in half precision."""
ALIGNED = 2
"""Tables begin at multiples of 16 bytes."""

_log = event_log()


class Places:
    """Where each path's matrices begin in an adapter's flat buffers, worked out once for each adapter."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = {path: number for number, path in enumerate(paths)}
        self._known: WeakKeyDictionary[LoraAdapter, tuple[np.ndarray, np.ndarray]] = WeakKeyDictionary()

    def number(self, path: str) -> int:
        """The row of a path."""
        return self._paths[path]

    def of(self, adapter: LoraAdapter | None) -> tuple[np.ndarray, np.ndarray]:
        """Begin of A, begin of B and rank [P, 3], a rank of 0 where it trains nothing; and the factors [P]."""
        if adapter is None:
            return np.zeros((len(self._paths), 3), np.int64), np.zeros(len(self._paths), np.float32)
        if adapter not in self._known:
            self._known[adapter] = self._laid_out(adapter.layout)
        return self._known[adapter]

    def _laid_out(self, layout: AdapterLayout) -> tuple[np.ndarray, np.ndarray]:
        places_P3 = np.zeros((len(self._paths), 3), np.int64)
        scales_P = np.zeros(len(self._paths), np.float32)
        start = 0
        for shape in layout.shapes:
            number = self._paths.get(shape.path)
            if number is not None:
                places_P3[number] = start, start + shape.numel_a, shape.rank
                scales_P[number] = shape.scale
            start += shape.numel_a + shape.numel_b
        return places_P3, scales_P


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the kernels read of one pass, in the shapes told there."""

    tiles: torch.Tensor
    bases: torch.Tensor
    places: torch.Tensor
    takers: torch.Tensor
    ranges: torch.Tensor
    scales: torch.Tensor
    tile_rows: int
    rank: int
    kernels: Any
    device: torch.device

    @classmethod
    def of(cls, groups: Sequence[Group], known: Places, kernels: Any, device: torch.device) -> Tables:
        """Send them to the device."""
        starts = [0, *(group.end for group in groups[:-1])]
        longest = max(
            (group.end - start for start, group in zip(starts, groups, strict=True) if group.adapter is not None),
            default=0,
        )
        laid_out = [known.of(group.adapter) for group in groups]
        rank = _power_of_two(max(int(places_P3[:, 2].max(initial=1)) for places_P3, _ in laid_out))
        tile_rows = LEAST_SIDE if longest <= LEAST_SIDE or rank > WIDE_RANK else ROWS_OF_TILE
        parts = [
            _tiles(groups, starts, tile_rows),
            np.array([0 if group.adapter is None else group.adapter.address for group in groups]),
            np.stack([each for each, _ in laid_out], axis=1),
            *_takers(groups, starts),
        ]
        parcel = Parcel(sum(part.size + -part.size % ALIGNED for part in parts), torch.int64, device)
        tables = [parcel.put(_padded(part))[: part.size].view(part.shape) for part in parts]
        parcel.send()
        tiles, bases, places, takers, ranges = tables
        return cls(
            tiles=tiles,
            bases=bases,
            places=places,
            takers=takers,
            ranges=ranges,
            scales=send(np.stack([factors for _, factors in laid_out], axis=1), torch.float32, device),
            tile_rows=tile_rows,
            rank=rank,
            kernels=kernels,
            device=device,
        )

    @property
    def on_device(self) -> Any:
        """Kernels are launched on the device that is current."""
        is_other = self.device.type == "cuda" and self.device.index not in (None, torch.cuda.current_device())
        return torch.cuda.device(self.device) if is_other else nullcontext()

    def shrink(self, x_TF: torch.Tensor, path: int, side: int) -> torch.Tensor:
        """``scale * x A^T`` or ``scale * x B`` [T, R]; rows that are nobody's, or of no rank here, are not written."""
        inner_TR = torch.empty((x_TF.shape[0], self.rank), dtype=x_TF.dtype, device=x_TF.device)
        if len(self.tiles):
            self.kernels.shrink[(len(self.tiles),)](
                x_TF, inner_TR, self.tiles, self.bases, self.places, self.scales,
                path, len(self.bases), x_TF.shape[1], x_TF.stride(0),
                SIDE=side, RANK=self.rank, TILE=self.tile_rows, BLOCK=FEATURES_OF_BLOCK, num_stages=self._stages,
            )  # fmt: skip
        return inner_TR

    def expand(self, inner_TR: torch.Tensor, y_TF: torch.Tensor, path: int, side: int) -> None:
        """``y += inner B^T`` or ``y += inner A`` in place."""
        if len(self.tiles):
            blocks = -(-y_TF.shape[1] // FEATURES_OF_BLOCK)
            self.kernels.expand[(len(self.tiles), blocks)](
                inner_TR, y_TF, self.tiles, self.bases, self.places,
                path, len(self.bases), y_TF.shape[1], y_TF.stride(0),
                SIDE=side, RANK=self.rank, TILE=self.tile_rows, BLOCK=FEATURES_OF_BLOCK, num_stages=self._stages,
            )  # fmt: skip

    def add_outer(self, inner_TR: torch.Tensor, x_TF: torch.Tensor, path: int, side: int) -> None:
        """Add ``inner^T x`` to the gradients of A, or ``x^T inner`` to those of B."""
        if len(self.takers):
            blocks = -(-x_TF.shape[1] // FEATURES_OF_SUM)
            self.kernels.add_outer[(len(self.takers), blocks)](
                inner_TR, x_TF, self.takers, self.ranges, self.places,
                path, len(self.bases), x_TF.shape[1], x_TF.stride(0),
                SIDE=side, RANK=self.rank, TILE=self.tile_rows, BLOCK=FEATURES_OF_SUM, num_stages=self._stages,
            )  # fmt: skip

    @property
    def _stages(self) -> int:
        return 1 if self.rank > WIDE_RANK else 3


class TabledUpdates:
    """The updates of one layer's rows. What it saves is ``scale * x A^T`` [T, R]."""

    def __init__(self, tables: Tables, path: int) -> None:
        self._tables = tables
        self._path = path

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`LayerUpdates`."""
        with self._tables.on_device:
            inner_TR = self._tables.shrink(_by_rows(x_TI), self._path, A_SIDE)
            self._tables.expand(inner_TR, y_TO, self._path, B_SIDE)
        return (inner_TR,)

    def add_gradients(
        self, *, dy_TO: torch.Tensor, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """See :class:`LayerUpdates`."""
        (inner_TR,) = saved
        dy_TO, x_TI = _by_rows(dy_TO), _by_rows(x_TI)
        with self._tables.on_device:
            d_inner_TR = self._tables.shrink(dy_TO, self._path, B_SIDE)
            self._tables.add_outer(d_inner_TR, x_TI, self._path, A_SIDE)
            self._tables.add_outer(inner_TR, dy_TO, self._path, B_SIDE)
            self._tables.expand(d_inner_TR, dx_TI, self._path, A_SIDE)


class TabledRoute:
    """Who owns which packed tokens of a pass; experts go another way."""

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
        self._trained = {path for group in groups if group.adapter is not None for path in group.adapter.compute_views}
        self._places = places
        self._others = others
        self._route_of_others: RoutedPass | None = None
        self._tables: Tables | None = None
        if self._trained:
            self._tables = Tables.of(groups, places, kernels, device)

    def updates(self, path: str) -> LayerUpdates:
        """See :class:`RoutedPass`."""
        if self._tables is None or path not in self._trained:
            return NoUpdates()
        return TabledUpdates(self._tables, self._places.number(path))

    def assign(self, experts_TK: torch.Tensor, num_experts: int) -> Assignments:
        """See :class:`RoutedPass`."""
        if self._route_of_others is None:
            self._route_of_others = self._others()
        return self._route_of_others.assign(experts_TK, num_experts)


@cache
def kernels_for(device_type: str, dtype: torch.dtype) -> Any | None:
    """The kernels, if they run there and are right; where they could and are not, a line in the log says why."""
    if not is_quick(device_type, dtype):
        return None
    reason = f"{KERNELS_FROM} is not installed"
    if find_spec(KERNELS_FROM) is not None:
        try:
            kernels = import_module(MODULE)
            worst = relative_error(kernels, torch.device(device_type), dtype, ranks=(5, 16))
        except Exception as error:  # noqa: BLE001 - the border to a compiler, which raises what it likes
            reason = str(error).partition("\n")[0]
        else:
            if worst < TOLERANCE:
                return kernels
            reason = f"products are off by {worst:.2g}"
    _log.warning("device.no_lora_kernels", dtype=str(dtype), reason=reason, next="matrices are stacked, slower")
    return None


def relative_error(kernels: Any, device: torch.device, dtype: torch.dtype, *, ranks: tuple[int, int]) -> float:
    """The largest of a layer's updates and gradients, by norm: of two adapters, one with rows in two places."""
    num_inputs, num_outputs = 72, 40
    generator = torch.Generator().manual_seed(0)

    def adapter(rank: int) -> LoraAdapter:
        # What lies before a matrix shifts it off the multiples that blocks begin at.
        layout = AdapterLayout((LoraShape("before", 3, 2, 1, 1.0), LoraShape("it", num_inputs, num_outputs, rank, 0.3)))
        made = LoraAdapter(LoraConfig(rank=rank), layout, device=device, compute_dtype=dtype, trainable=True)
        made.params.copy_(torch.randn(layout.numel, generator=generator))
        made.publish()
        return made

    one, two = (adapter(rank) for rank in ranks)
    spans = ((one, 0, 70), (None, 70, 73), (two, 73, 90), (one, 90, 91))
    segments = [Segment(owner, start, end, owner.grad_views if owner else None) for owner, start, end in spans]
    x_TI, y_TO, dy_TO, dx_TI = (
        torch.randn(spans[-1][2], size, generator=generator).to(device, dtype)
        for size in (num_inputs, num_outputs, num_outputs, num_inputs)
    )
    expected_y, expected_dx = y_TO.double(), dx_TI.double()
    expected = {owner: [torch.zeros_like(side).double() for side in owner.grad_views["it"]] for owner in (one, two)}
    for owner, start, end in spans:
        if owner is not None:
            rows, (a_RI, b_OR) = slice(start, end), (side.double() for side in owner.compute_views["it"])
            x, dy = x_TI[rows].double(), dy_TO[rows].double()
            expected_y[rows] += 0.3 * x @ a_RI.t() @ b_OR.t()
            expected_dx[rows] += 0.3 * dy @ b_OR @ a_RI
            expected[owner][0] += 0.3 * (dy @ b_OR).t() @ x
            expected[owner][1] += 0.3 * dy.t() @ (x @ a_RI.t())
    places = Places(["it"])
    tables = Tables.of(groups_of(segments, len(x_TI)), places, kernels, device)
    updates = TabledUpdates(tables, places.number("it"))
    saved = updates.add(y_TO, x_TI)
    updates.add_gradients(dy_TO=dy_TO, dx_TI=dx_TI, x_TI=x_TI, saved=saved)
    pairs = [(y_TO, expected_y), (dx_TI, expected_dx)]
    for owner in (one, two):
        pairs += zip(owner.grad_views["it"], expected[owner], strict=True)
        pairs += [(1 + owner.grad[: owner.layout.shapes[0].numel_a], torch.ones(3).double())]
    errors = [(found.double() - right.to(device)).norm() / right.norm().to(device) for found, right in pairs]
    return float(torch.stack(errors).max())


def _by_rows(x_TF: torch.Tensor) -> torch.Tensor:
    return x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()


def _power_of_two(rank: int) -> int:
    return max(LEAST_SIDE, 1 << (rank - 1).bit_length())


def _padded(part: np.ndarray) -> np.ndarray:
    return np.pad(part.reshape(-1), (0, -part.size % ALIGNED))


def _tiles(groups: Sequence[Group], starts: Sequence[int], tile_rows: int) -> np.ndarray:
    """First row, row behind the last and group of each [N, 3]; rows that nobody owns are in none."""
    tiles = [
        (first, min(first + tile_rows, group.end), number)
        for number, (start, group) in enumerate(zip(starts, groups, strict=True))
        if group.adapter is not None
        for first in range(start, group.end, tile_rows)
    ]
    return np.array(tiles, dtype=np.int64).reshape(-1, 3)


def _takers(groups: Sequence[Group], starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each place where gradients gather [U, 4], and the ranges of rows whose gradients gather there [M, 2]."""
    wanted: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        if group.gradient is not None and group.adapter is not None:
            wanted.setdefault(id(group.gradient), []).append(number)
    takers: list[tuple[int, int, int, int]] = []
    ranges: list[tuple[int, int]] = []
    for numbers in wanted.values():
        gradient = groups[numbers[0]].gradient
        assert gradient is not None
        takers.append((_address(gradient), numbers[0], len(ranges), len(numbers)))
        ranges += [(starts[number], groups[number].end) for number in numbers]
    return np.array(takers, dtype=np.int64).reshape(-1, 4), np.array(ranges, dtype=np.int64).reshape(-1, 2)


def _address(gradient: Mapping[str, LoraPair]) -> int:
    """Where the flat buffer begins that these are views of: with the first module's A."""
    return next(iter(gradient.values())).a.data_ptr()
