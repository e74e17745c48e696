"""Low-rank products of rows with the matrices of their owners, read where each adapter keeps them, in Triton.

A launch costs the host more than most of these products take a GPU. So one launch serves all owners of a layer, however
many they are and whatever their ranks: nothing is stacked, padded or copied first, and gradients are added in float32
to where they gather. The kernels follow the idea of Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285), for
training too. A row's numbers come from its own owner's alone, in an order that does not depend on the company.

What rows belong to whom is told by tables of int64 (``lora_tables``): ``tiles`` [N, 3] of first row, row behind last,
and owner; ``bases`` [G] the address of each owner's flat buffer; ``places`` [P, G, 3] of where A and B begin in
it and the rank, for each path; ``scales`` [P, G] in float32.

``SIDE`` says with which matrix: 0 is A [R, I], 1 is B [O, R]. Shapes: T rows, I inputs, O outputs, R padded rank.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: SIM108 - the compiler takes a branch on constants away, whatever shapes the other would have
import triton
import triton.language as tl


@triton.jit
def _place(places, path, num_groups, group, SIDE: tl.constexpr):
    """Where an owner's matrix of a path begins in its buffer, and its rank; 0 is none."""
    place = places + (path * num_groups + group) * 3
    return tl.load(place + SIDE), tl.load(place + 2).to(tl.int32)


@triton.jit(do_not_specialize=["path", "num_groups"])
def shrink(
    x, inner, tiles, bases, places, scales, path, num_groups, num_features, stride,
    SIDE: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``inner = scale * x A^T``, or with B ``scale * x B``: [T, features] to [T, R]."""
    tile = tiles + tl.program_id(0) * 3
    group = tl.load(tile + 2)
    start, rank = _place(places, path, num_groups, group, SIDE)
    if rank == 0:
        return
    rows = tl.load(tile) + tl.arange(0, TILE)
    is_row = rows < tl.load(tile + 1)
    matrix = tl.load(bases + group).to(tl.pointer_type(x.dtype.element_ty)) + start
    ranks = tl.arange(0, RANK)
    total = tl.zeros((TILE, RANK), dtype=tl.float32)
    for first in range(0, num_features, BLOCK):
        features = first + tl.arange(0, BLOCK)
        is_feature = features < num_features
        is_part = is_row[:, None] & is_feature[None, :]
        part = tl.load(x + rows[:, None] * stride + features[None, :], mask=is_part, other=0.0)
        if SIDE == 0:
            at = ranks[None, :] * num_features + features[:, None]
        else:
            at = features[:, None] * rank + ranks[None, :]
        weight = tl.load(matrix + at, mask=is_feature[:, None] & (ranks < rank)[None, :], other=0.0)
        total = tl.dot(part, weight, total)
    scale = tl.load(scales + path * num_groups + group)
    found = (total * scale).to(inner.dtype.element_ty)
    tl.store(inner + rows[:, None] * RANK + ranks[None, :], found, mask=is_row[:, None])


@triton.jit(do_not_specialize=["path", "num_groups"])
def expand(
    inner, y, tiles, bases, places, path, num_groups, num_features, stride,
    SIDE: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``y += inner B^T``, or with A ``y += inner A``: [T, R] to [T, features], rounded once."""
    tile = tiles + tl.program_id(0) * 3
    group = tl.load(tile + 2)
    start, rank = _place(places, path, num_groups, group, SIDE)
    if rank == 0:
        return
    rows = tl.load(tile) + tl.arange(0, TILE)
    is_row = rows < tl.load(tile + 1)
    matrix = tl.load(bases + group).to(tl.pointer_type(y.dtype.element_ty)) + start
    ranks = tl.arange(0, RANK)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = features < num_features
    part = tl.load(inner + rows[:, None] * RANK + ranks[None, :], mask=is_row[:, None], other=0.0)
    if SIDE == 0:
        at = ranks[:, None] * num_features + features[None, :]
    else:
        at = features[None, :] * rank + ranks[:, None]
    weight = tl.load(matrix + at, mask=(ranks < rank)[:, None] & is_feature[None, :], other=0.0)
    update = tl.dot(part, weight)
    place = y + rows[:, None] * stride + features[None, :]
    is_place = is_row[:, None] & is_feature[None, :]
    before = tl.load(place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(place, (before + update).to(y.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["path", "num_groups"])
def add_outer(
    inner, x, takers, ranges, places, path, num_groups, num_features, stride,
    SIDE: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``dA += inner^T x``, or ``dB += x^T inner``: sums over the rows of each taker, in their order, in float32.

    ``takers`` [U, 4]: the address of a gradient, an owner with its layout, its first range of rows, how many it has;
    ``ranges`` [M, 2]: first row and row behind the last.
    """
    taker = takers + tl.program_id(0) * 4
    start, rank = _place(places, path, num_groups, tl.load(taker + 1), SIDE)
    if rank == 0:
        return
    ranks = tl.arange(0, RANK)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = features < num_features
    total = tl.zeros((RANK, BLOCK), dtype=tl.float32)
    first_range = tl.load(taker + 2)
    for number in range(first_range, first_range + tl.load(taker + 3)):
        end = tl.load(ranges + number * 2 + 1)
        for first in range(tl.load(ranges + number * 2), end, TILE):
            rows = first + tl.arange(0, TILE)
            is_row = rows < end
            left = tl.load(inner + rows[:, None] * RANK + ranks[None, :], mask=is_row[:, None], other=0.0)
            is_right = is_row[:, None] & is_feature[None, :]
            right = tl.load(x + rows[:, None] * stride + features[None, :], mask=is_right, other=0.0)
            total = tl.dot(tl.trans(left), right, total)
    gradient = tl.load(taker).to(tl.pointer_type(tl.float32)) + start
    if SIDE == 0:
        place = gradient + ranks[:, None] * num_features + features[None, :]
    else:
        place = gradient + features[None, :] * rank + ranks[:, None]
    is_place = (ranks < rank)[:, None] & is_feature[None, :]
    tl.store(place, tl.load(place, mask=is_place, other=0.0) + total, mask=is_place)
