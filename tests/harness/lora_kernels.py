"""A stand-in for the kernels that read adapters in place, which only GPUs run: the same tables, row after row.

What an address points at is read there; what no tile covers, and what lies beyond a rank, is left as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness.recorded import as_one


class Kernel:
    """Called as a compiled one is: with a grid first."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self.num_calls = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.num_calls += 1
        return partial(as_one, self._run, grid)


class LoraKernels:
    """What ``twinkle.module.lora_kernels`` has."""

    def __init__(self) -> None:
        self.shrink = Kernel(_shrink)
        self.expand = Kernel(_expand)
        self.add_outer = Kernel(_add_outer)


def _at(address: int, start: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(address + start * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _matrix(address: int, place: list[int], num_features: int, side: int, dtype: torch.dtype) -> torch.Tensor | None:
    """[R, features], whichever way it lies; none of rank 0."""
    rank = place[2]
    if rank == 0:
        return None
    if side == 0:
        return _at(address, place[0], (rank, num_features), dtype)
    return _at(address, place[1], (num_features, rank), dtype).t()


def _place(places: torch.Tensor, path: int, group: int) -> list[int]:
    return [int(number) for number in places[path, group]]


def _shrink(
    grid: tuple[int, int], x_0: torch.Tensor, x_1: torch.Tensor, x_2: torch.Tensor, inner: torch.Tensor,
    tiles: torch.Tensor, bases: torch.Tensor, places: torch.Tensor, scales: torch.Tensor,
    path: int, num_groups: int, num_rows: int, *sizes: int,
    SIDE: int, MEMBERS: int, RANK: int, TILE: int, **_: Any,
) -> None:  # fmt: skip
    assert grid == (len(tiles), MEMBERS) and places.shape[1] == num_groups
    assert inner.shape == (MEMBERS, num_rows, RANK)
    inner.fill_(torch.nan)
    for member, x in enumerate(_members((x_0, x_1, x_2), sizes, MEMBERS)):
        for start, end, group in tiles.tolist():
            assert 0 <= end - start <= TILE
            weight = _matrix(int(bases[group]), _place(places, path + member, group), x.shape[1], SIDE, x.dtype)
            if weight is not None:
                inner[member, start:end] = 0.0
                found = (x[start:end].float() @ weight.float().t()) * scales[path + member, group]
                inner[member, start:end, : len(weight)] = found.to(inner.dtype)


def _expand(
    grid: tuple[int, int, int], inner: torch.Tensor, y_0: torch.Tensor, y_1: torch.Tensor, y_2: torch.Tensor,
    tiles: torch.Tensor, bases: torch.Tensor, places: torch.Tensor,
    path: int, num_groups: int, num_rows: int, *sizes: int,
    SIDE: int, MEMBERS: int, SUMMED: int, RANK: int, TILE: int, BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    ys = _members((y_0, y_1, y_2), sizes, MEMBERS)
    assert grid[::2] == (len(tiles), MEMBERS) and grid[1] * BLOCK >= max(y.shape[1] for y in ys)
    assert inner.shape == (MEMBERS * SUMMED, num_rows, RANK) and places.shape[1] == num_groups
    for member, y in enumerate(ys):
        for start, end, group in tiles.tolist():
            assert 0 <= end - start <= TILE
            updates = []
            for number in range(member, member + SUMMED):
                weight = _matrix(int(bases[group]), _place(places, path + number, group), y.shape[1], SIDE, y.dtype)
                if weight is not None:
                    updates.append(inner[number, start:end, : len(weight)].float() @ weight.float())
            if updates:
                y[start:end] = (y[start:end].float() + torch.stack(updates).sum(0)).to(y.dtype)


def _add_outer(
    grid: tuple[int, int, int], d_inner: torch.Tensor, inner: torch.Tensor, x: torch.Tensor,
    dy_0: torch.Tensor, dy_1: torch.Tensor, dy_2: torch.Tensor, takers: torch.Tensor, ranges: torch.Tensor,
    places: torch.Tensor, path: int, num_groups: int, num_rows: int,
    num_inputs: int, features_0: int, features_1: int, features_2: int, stride: int, *strides: int,
    MEMBERS: int, RANK: int, BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    dys = _members((dy_0, dy_1, dy_2), (features_0, features_1, features_2, *strides), MEMBERS)
    widest = max(num_inputs, *(dy.shape[1] for dy in dys))
    assert grid[::2] == (len(takers), 2 * MEMBERS) and grid[1] * BLOCK >= widest and places.shape[1] == num_groups
    assert (num_inputs, stride) == (x.shape[1], x.stride(0)) and len(x) == num_rows
    assert inner.shape == d_inner.shape == (MEMBERS, num_rows, RANK)
    for member, dy in enumerate(dys):
        for side, left, right in ((0, d_inner[member], x), (1, inner[member], dy)):
            for address, group, first, number in takers.tolist():
                place = _place(places, path + member, group)
                gradient = _matrix(address, place, right.shape[1], side, torch.float32)
                for start, end in ranges[first : first + number].tolist() if gradient is not None else ():
                    gradient += left[start:end, : len(gradient)].float().t() @ right[start:end].float()


def _members(given: tuple[torch.Tensor, ...], sizes: tuple[int, ...], num_members: int) -> tuple[torch.Tensor, ...]:
    """Those that there are of three, once what was told of each is seen to be true."""
    assert sizes == (*(each.shape[1] for each in given), *(each.stride(0) for each in given))
    return given[:num_members]
