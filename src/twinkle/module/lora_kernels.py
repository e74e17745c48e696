"""Low-rank products of rows with the matrices of their owners, read where each adapter keeps them, in Triton.

A launch costs the host more than most of these products take a GPU. So one launch serves all owners of a layer, however
many they are and whatever their ranks: nothing is stacked, padded or copied first, and gradients are added in float32
to where they gather. It serves all members of a group, too: up to three layers that are given the same rows, such as
queries, keys and values. The kernels follow the idea of Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285), for
training too. A row's numbers come from its own owner's alone, in an order that does not depend on the company.

What rows belong to whom is told by tables of int64 (``lora_tables``): ``tiles`` [N, 3] of first row, row behind last,
and owner; ``bases`` [G] the address of each owner's flat buffer; ``places`` [P, G, 3] of where A and B begin in
it and the rank, for each path; ``scales`` [P, G] in float32. The paths of a group follow one another from ``path`` on.

``SIDE`` says with which matrix: 0 is A [R, I], 1 is B [O, R]. Shapes: M members, T rows, I inputs, O outputs, R padded
rank. What members have each is given three times, whatever their number.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: SIM102, RET505 - the compiler takes a branch on constants away, whatever types the other would have
import triton
import triton.language as tl


@triton.jit
def _place(places, path, num_groups, group):
    """Where an owner's A and B of a path begin in its buffer, and their rank; 0 is none."""
    place = places + (path * num_groups + group) * 3
    return tl.load(place), tl.load(place + 1), tl.load(place + 2).to(tl.int32)


@triton.jit
def _rows_of(tiles, TILE: tl.constexpr):
    """The rows of this program's tile, which of them there are, and whose."""
    tile = tiles + tl.program_id(0) * 3
    rows = tl.load(tile) + tl.arange(0, TILE)
    return rows, rows < tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def _of_member(member, first, second, third, MEMBERS: tl.constexpr):
    found = first
    if MEMBERS > 1:
        if member == 1:
            found = second
    if MEMBERS > 2:
        if member == 2:
            found = third
    return found


@triton.jit
def _size_of_member(member, first, second, third, MEMBERS: tl.constexpr):
    """By arithmetic, not by branches: a size of 1 is a constant to the compiler, of another type."""
    found = (member == 0).to(tl.int32) * first
    if MEMBERS > 1:
        found += (member == 1).to(tl.int32) * second
    if MEMBERS > 2:
        found += (member == 2).to(tl.int32) * third
    return found


@triton.jit
def _weight(bases, places, path, num_groups, group, num_features, like, SIDE: tl.constexpr):
    """Where an owner's matrix of a path begins, how far to the next of its ranks and of its features, and its rank."""
    start_a, start_b, rank = _place(places, path, num_groups, group)
    matrix = tl.load(bases + group).to(tl.pointer_type(like.dtype.element_ty))
    if SIDE == 0:
        return matrix + start_a, num_features, 1, rank
    else:
        return matrix + start_b, 1, rank, rank


@triton.jit(do_not_specialize=["path", "num_groups", "num_rows"])
def shrink(
    x_0, x_1, x_2, inner, tiles, bases, places, scales, path, num_groups, num_rows,
    features_0, features_1, features_2, stride_0, stride_1, stride_2,
    SIDE: tl.constexpr, MEMBERS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``inner = scale * x A^T``, or with B ``scale * x B``: of each member [T, features] to [M, T, R]."""
    member = tl.program_id(1)
    x = _of_member(member, x_0, x_1, x_2, MEMBERS)
    num_features = _size_of_member(member, features_0, features_1, features_2, MEMBERS)
    stride = _size_of_member(member, stride_0, stride_1, stride_2, MEMBERS)
    rows, is_row, group = _rows_of(tiles, TILE)
    matrix, rank_step, feature_step, rank = _weight(
        bases, places, path + member, num_groups, group, num_features, x, SIDE
    )
    if rank == 0:
        return
    ranks = tl.arange(0, RANK)
    total = tl.zeros((TILE, RANK), dtype=tl.float32)
    for first in range(0, num_features, BLOCK):
        features = first + tl.arange(0, BLOCK)
        is_feature = features < num_features
        is_part = is_row[:, None] & is_feature[None, :]
        part = tl.load(x + rows[:, None] * stride + features[None, :], mask=is_part, other=0.0)
        at = ranks[None, :] * rank_step + features[:, None] * feature_step
        weight = tl.load(matrix + at, mask=is_feature[:, None] & (ranks < rank)[None, :], other=0.0)
        total = tl.dot(part, weight, total)
    scale = tl.load(scales + (path + member) * num_groups + group)
    found = (total * scale).to(inner.dtype.element_ty)
    tl.store(inner + (member * num_rows + rows)[:, None] * RANK + ranks[None, :], found, mask=is_row[:, None])


@triton.jit(do_not_specialize=["path", "num_groups", "num_rows"])
def expand(
    inner, y_0, y_1, y_2, tiles, bases, places, path, num_groups, num_rows,
    features_0, features_1, features_2, stride_0, stride_1, stride_2,
    SIDE: tl.constexpr, MEMBERS: tl.constexpr, SUMMED: tl.constexpr,
    RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``y += inner B^T`` of each member, or with A ``y += inner A`` of all (``SUMMED``) to one: [M, T, R] to
    [T, features], rounded once.
    """
    member = tl.program_id(2)
    y = _of_member(member, y_0, y_1, y_2, MEMBERS)
    num_features = _size_of_member(member, features_0, features_1, features_2, MEMBERS)
    stride = _size_of_member(member, stride_0, stride_1, stride_2, MEMBERS)
    if tl.program_id(1) * BLOCK >= num_features:
        return
    rows, is_row, group = _rows_of(tiles, TILE)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = features < num_features
    ranks = tl.arange(0, RANK)
    update = tl.zeros((TILE, BLOCK), dtype=tl.float32)
    total_rank = 0
    for number in range(member, member + SUMMED):
        matrix, rank_step, feature_step, rank = _weight(
            bases, places, path + number, num_groups, group, num_features, y, SIDE
        )
        # Nothing was written of a member of no rank.
        is_part = is_row[:, None] & (ranks < rank)[None, :]
        part = tl.load(inner + (number * num_rows + rows)[:, None] * RANK + ranks[None, :], mask=is_part, other=0.0)
        at = ranks[:, None] * rank_step + features[None, :] * feature_step
        weight = tl.load(matrix + at, mask=(ranks < rank)[:, None] & is_feature[None, :], other=0.0)
        update = tl.dot(part, weight, update)
        total_rank += rank
    place = y + rows[:, None] * stride + features[None, :]
    is_place = is_row[:, None] & is_feature[None, :] & (total_rank > 0)
    before = tl.load(place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(place, (before + update).to(y.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["path", "num_groups", "num_rows"])
def add_outer(
    d_inner, inner, x, dy_0, dy_1, dy_2, takers, ranges, places, path, num_groups, num_rows,
    num_inputs, features_0, features_1, features_2, stride, stride_0, stride_1, stride_2,
    MEMBERS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``dA += d_inner^T x`` and ``dB += dy^T inner`` of each member, in programs of their own: sums over the rows of
    each taker, in their order, in float32.

    ``takers`` [U, 4]: the address of a gradient, an owner with its layout, its first range of rows, how many it has;
    ``ranges`` [M, 2]: first row and row behind the last.
    """
    member = tl.program_id(2) // 2
    is_b = tl.program_id(2) % 2
    left, right = d_inner, x
    if is_b == 1:
        left, right = inner, _of_member(member, dy_0, dy_1, dy_2, MEMBERS)
    num_outputs = _size_of_member(member, features_0, features_1, features_2, MEMBERS)
    dy_stride = _size_of_member(member, stride_0, stride_1, stride_2, MEMBERS)
    num_features = num_inputs + is_b * (num_outputs - num_inputs)
    right_stride = stride + is_b * (dy_stride - stride)
    taker = takers + tl.program_id(0) * 4
    start_a, start_b, rank = _place(places, path + member, num_groups, tl.load(taker + 1))
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if rank == 0:
        return
    if tl.program_id(1) * BLOCK >= num_features:
        return
    ranks = tl.arange(0, RANK)
    is_feature = features < num_features
    total = tl.zeros((RANK, BLOCK), dtype=tl.float32)
    first_range = tl.load(taker + 2)
    for number in range(first_range, first_range + tl.load(taker + 3)):
        end = tl.load(ranges + number * 2 + 1)
        for first in range(tl.load(ranges + number * 2), end, TILE):
            rows = first + tl.arange(0, TILE)
            is_row = rows < end
            places_of_left = left + (member * num_rows + rows)[:, None] * RANK + ranks[None, :]
            of_ranks = tl.load(places_of_left, mask=is_row[:, None], other=0.0)
            is_right = is_row[:, None] & is_feature[None, :]
            of_features = tl.load(right + rows[:, None] * right_stride + features[None, :], mask=is_right, other=0.0)
            total = tl.dot(tl.trans(of_ranks), of_features, total)
    gradient = tl.load(taker).to(tl.pointer_type(tl.float32)) + start_a + is_b * (start_b - start_a)
    rank_step = num_features + is_b * (1 - num_features)
    feature_step = 1 + is_b * (rank - 1)
    place = gradient + ranks[:, None] * rank_step + features[None, :] * feature_step
    is_place = (ranks < rank)[:, None] & is_feature[None, :]
    tl.store(place, tl.load(place, mask=is_place, other=0.0) + total, mask=is_place)
