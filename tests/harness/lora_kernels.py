"""A stand-in for the kernels that read adapters in place, which only GPUs run: the same tables, row after row.

What an address points at is read there; what no tile covers, and what lies beyond a rank, is left as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class Kernel:
    """Called as a compiled one is: with a grid first."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self.num_calls = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.num_calls += 1
        return partial(self._run, grid)


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
    grid: tuple[int], x: torch.Tensor, inner: torch.Tensor, tiles: torch.Tensor, bases: torch.Tensor,
    places: torch.Tensor, scales: torch.Tensor, path: int, num_groups: int, num_features: int, stride: int,
    *, SIDE: int, RANK: int, TILE: int, **_: Any,
) -> None:  # fmt: skip
    assert grid == (len(tiles),) and places.shape[1] == num_groups
    assert (num_features, stride) == (x.shape[1], x.stride(0)) and inner.shape[1] == RANK
    inner.fill_(torch.nan)
    for start, end, group in tiles.tolist():
        assert 0 < end - start <= TILE
        weight = _matrix(int(bases[group]), _place(places, path, group), num_features, SIDE, x.dtype)
        if weight is not None:
            inner[start:end] = 0.0
            found = (x[start:end].float() @ weight.float().t()) * scales[path, group]
            inner[start:end, : len(weight)] = found.to(inner.dtype)


def _expand(
    grid: tuple[int, int], inner: torch.Tensor, y: torch.Tensor, tiles: torch.Tensor, bases: torch.Tensor,
    places: torch.Tensor, path: int, num_groups: int, num_features: int, stride: int,
    *, SIDE: int, RANK: int, TILE: int, BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    assert grid[0] == len(tiles) and grid[1] * BLOCK >= num_features and places.shape[1] == num_groups
    assert (num_features, stride) == (y.shape[1], y.stride(0)) and inner.shape[1] == RANK
    for start, end, group in tiles.tolist():
        assert 0 < end - start <= TILE
        weight = _matrix(int(bases[group]), _place(places, path, group), num_features, SIDE, y.dtype)
        if weight is not None:
            update = inner[start:end, : len(weight)].float() @ weight.float()
            y[start:end] = (y[start:end].float() + update).to(y.dtype)


def _add_outer(
    grid: tuple[int, int], inner: torch.Tensor, x: torch.Tensor, takers: torch.Tensor, ranges: torch.Tensor,
    places: torch.Tensor, path: int, num_groups: int, num_features: int, stride: int,
    *, SIDE: int, RANK: int, BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    assert grid[0] == len(takers) and grid[1] * BLOCK >= num_features and places.shape[1] == num_groups
    assert (num_features, stride) == (x.shape[1], x.stride(0)) and inner.shape[1] == RANK
    for address, group, first, number in takers.tolist():
        gradient = _matrix(address, _place(places, path, group), num_features, SIDE, torch.float32)
        for start, end in ranges[first : first + number].tolist() if gradient is not None else ():
            gradient += inner[start:end, : len(gradient)].float().t() @ x[start:end].float()
