"""What kernels need to know of a pass that read each adapter's matrices where they lie (``lora_kernels``).

Which rows are whose and where whose matrices begin goes to the device in one table at the start of a pass; no layer
waits for an answer from it.

Shapes: T packed tokens, N tiles of rows, G groups, P paths, U takers of gradients, I inputs, O outputs, F features of
either, R padded rank; M members of a group of layers (in ``ranges``: ranges of rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from twinkle.infra.sending import FixedParcel, Parcel, send
from twinkle.module.adapter import AdapterLayout, LoraAdapter, LoraPair
from twinkle.module.stacked import Group

T = TypeVar("T")

LEAST_SIDE = 16
"""Of a block that is multiplied."""
ROWS_OF_TILE = 64
FEATURES_OF_BLOCK = 64
FEATURES_OF_SUM = 32
"""Of one sum over rows: few, since there is no other way to share out the rows."""
WIDE_RANK = 128
"""From here on a block's shared memory holds fewer rows, and fewer stages of them."""
ALIGNED = 2
"""Tables begin at multiples of 16 bytes."""


class Places:
    """Where each path's matrices begin in an adapter's flat buffers, worked out once for each adapter."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = {path: number for number, path in enumerate(paths)}
        self._known: WeakKeyDictionary[LoraAdapter, tuple[np.ndarray, np.ndarray]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """How many paths there are."""
        return len(self._paths)

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

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
        rank = padded_rank((group.adapter for group in groups), known)
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

    def shrink(self, xs_TF: Sequence[torch.Tensor], path: int, side: int) -> torch.Tensor:
        """``scale * x A^T`` or ``scale * x B`` [M, T, R] of a group whose paths begin with that one.

        Rows that are nobody's, or of no rank in a member, are not written.
        """
        num_members, num_rows = len(xs_TF), xs_TF[0].shape[0]
        inner_MTR = xs_TF[0].new_empty((num_members, num_rows, self.rank))
        if len(self.tiles):
            self.kernels.shrink[(len(self.tiles), num_members)](
                *_thrice(xs_TF), inner_MTR, self.tiles, self.bases, self.places, self.scales,
                path, len(self.bases), num_rows, *_thrice(_widths(xs_TF)), *_thrice(_strides(xs_TF)),
                SIDE=side, MEMBERS=num_members, **self._blocks(FEATURES_OF_BLOCK),
            )  # fmt: skip
        return inner_MTR

    def expand(self, inner_MTR: torch.Tensor, ys_TF: Sequence[torch.Tensor], path: int, side: int) -> None:
        """``y += inner B^T`` of each member, or ``y += inner A`` of all of them to one, in place."""
        if len(self.tiles):
            widths = _widths(ys_TF)
            self.kernels.expand[(len(self.tiles), -(-max(widths) // FEATURES_OF_BLOCK), len(ys_TF))](
                inner_MTR, *_thrice(ys_TF), self.tiles, self.bases, self.places,
                path, len(self.bases), inner_MTR.shape[1], *_thrice(widths), *_thrice(_strides(ys_TF)),
                SIDE=side, MEMBERS=len(ys_TF), SUMMED=len(inner_MTR) // len(ys_TF), **self._blocks(FEATURES_OF_BLOCK),
            )  # fmt: skip

    def add_outer(
        self,
        d_inner_MTR: torch.Tensor,
        inner_MTR: torch.Tensor,
        x_TI: torch.Tensor,
        dys_TO: Sequence[torch.Tensor],
        path: int,
    ) -> None:
        """Add ``d_inner^T x`` to the gradients of A, and ``dy^T inner`` to those of B, of each member."""
        if len(self.takers):
            widths = _widths(dys_TO)
            blocks = -(-max(x_TI.shape[1], *widths) // FEATURES_OF_SUM)
            self.kernels.add_outer[(len(self.takers), blocks, 2 * len(dys_TO))](
                d_inner_MTR, inner_MTR, x_TI, *_thrice(dys_TO), self.takers, self.ranges, self.places,
                path, len(self.bases), x_TI.shape[0],
                x_TI.shape[1], *_thrice(widths), x_TI.stride(0), *_thrice(_strides(dys_TO)),
                MEMBERS=len(dys_TO), **self._blocks(FEATURES_OF_SUM),
            )  # fmt: skip

    def _blocks(self, features: int) -> dict[str, int]:
        stages = 1 if self.rank > WIDE_RANK else 3
        return {"RANK": self.rank, "TILE": self.tile_rows, "BLOCK": features, "num_stages": stages}


class FixedTables:
    """Tables of rows without gradients that stay where they are on the device, for a pass that is recorded once.

    Who owns which rows is told anew between two runs of it. There are as many tiles as rows; those that nobody needs
    have no rows, and belong to a last owner of no rank.
    """

    def __init__(self, num_rows: int, rank: int, known: Places, kernels: Any, device: torch.device) -> None:
        self._known = known
        self._num_rows = num_rows
        num_groups = num_rows + 1
        self._parcel = FixedParcel(
            [
                ((num_rows, 3), torch.int64),
                ((num_groups,), torch.int64),
                ((len(known), num_groups, 3), torch.int64),
                ((len(known), num_groups), torch.float32),
            ],
            device,
        )
        tiles, bases, places, scales = self._parcel.tensors
        self.tables = Tables(
            tiles=tiles,
            bases=bases,
            places=places,
            takers=torch.empty(0, 4, dtype=torch.int64, device=device),
            ranges=torch.empty(0, 2, dtype=torch.int64, device=device),
            scales=scales,
            tile_rows=LEAST_SIDE,
            rank=rank,
            kernels=kernels,
            device=device,
        )

    def tell(self, groups: Sequence[Group]) -> None:
        """Send whose the rows are; none of the owners has a larger rank."""
        starts = [0, *(group.end for group in groups[:-1])]
        nobody = self._num_rows
        tiles_N3 = np.tile(np.array([0, 0, nobody], np.int64), (self._num_rows, 1))
        used_N3 = _tiles(groups, starts, LEAST_SIDE)
        tiles_N3[: len(used_N3)] = used_N3
        bases_G = np.zeros(nobody + 1, np.int64)
        places_PG3 = np.zeros((len(self._known), nobody + 1, 3), np.int64)
        scales_PG = np.zeros((len(self._known), nobody + 1), np.float32)
        for number, group in enumerate(groups):
            if group.adapter is not None:
                bases_G[number] = group.adapter.address
                places_PG3[:, number], scales_PG[:, number] = self._known.of(group.adapter)
        self._parcel.send([tiles_N3, bases_G, places_PG3, scales_PG])


def padded_rank(adapters: Iterable[LoraAdapter | None], known: Places) -> int:
    """What the kernels take for the largest rank among some adapters."""
    ranks = [int(known.of(adapter)[0][:, 2].max(initial=1)) for adapter in adapters if adapter is not None]
    return max(LEAST_SIDE, 1 << (max(ranks, default=1) - 1).bit_length())


def _thrice(values: Sequence[T]) -> tuple[T, T, T]:
    """As the kernels take what up to three members have each."""
    return values[0], values[min(1, len(values) - 1)], values[-1]


def _widths(matrices: Sequence[torch.Tensor]) -> list[int]:
    return [matrix.shape[1] for matrix in matrices]


def _strides(matrices: Sequence[torch.Tensor]) -> list[int]:
    return [matrix.stride(0) for matrix in matrices]


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
