"""Attention of single queries over keys and values that lie in pages, in Triton, as Flash-Decoding splits it.

A sequence's keys are cut at fixed positions, every ``SPLIT`` of them from its first on. A program attends all query
heads that share a key head over one split, since with the sequences alone a device would have little to do; a second
launch combines the splits in their order. What is added up in which order depends on a sequence's own length alone, so
its values are the same bits in any company and with a table of any width. Nothing on the host depends on values: both
launches can be captured in a graph, which reads ``used`` and ``table`` anew each time.

Of a sequence's row of the table the pages of its ``used`` keys are looked at, and of those pages these keys. What
differs from step to step is no constant to the compiler, nor are a model's numbers of heads: nothing is compiled anew.

``used`` [S] and ``table`` [S, M] are int32; queries [S, H, D], keys and values [N, P, G, D] in half precision;
``parts`` [S, H, splits, D], ``maxima`` and ``sums`` [S, H, splits] in float32. With a window a sequence's splits are
counted from the one that the window begins in.
"""

from __future__ import annotations

# mypy: ignore-errors
import triton
import triton.language as tl

VARYING = ["maxima", "sums", "used", "window", "heads", "num_splits"]


@triton.jit
def _first_key(end, window, IS_WINDOWED: tl.constexpr):
    """The first that the last one sees."""
    first = end * 0
    if IS_WINDOWED:
        first = tl.maximum(end - window, 0)
    return first


@triton.jit(do_not_specialize=[*VARYING, "table", "table_stride", "groups"])
def attend_splits(
    queries, keys, values, parts, maxima, sums, used, table, table_stride, heads, groups, num_splits,
    scale, cap, window, IS_CAPPED: tl.constexpr, IS_WINDOWED: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one sequence, key head and split: the values by their weights, not yet divided by the sum of these."""
    sequence = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    number = tl.program_id(2)
    end = tl.load(used + sequence)
    first = _first_key(end, window, IS_WINDOWED)
    split = (first // SPLIT + number) * SPLIT
    if split >= end:
        return
    row = tl.arange(0, ROWS)
    feature = tl.arange(0, SIZE)
    place = tl.arange(0, BLOCK)
    shared = heads // groups
    is_row = row < shared
    head = sequence * heads + group * shared + row
    query = tl.load(queries + head[:, None] * SIZE + feature[None, :], mask=is_row[:, None], other=0.0)
    in_block = place[:, None] * groups * SIZE + feature[None, :]
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    part = tl.zeros((ROWS, SIZE), tl.float32)
    # Every block of these has a key that is seen: the maximum is a number from the first on.
    start = tl.maximum(split, first // BLOCK * BLOCK)
    for begin in range(start, tl.minimum(split + SPLIT, end), BLOCK):
        page = tl.load(table + sequence * table_stride + begin // PAGE).to(tl.int64)
        block = ((page * PAGE + begin % PAGE) * groups + group) * SIZE
        position = begin + place
        is_seen = (position >= first) & (position < end)
        # Not by a weight of nothing: what lies behind the end may be NaN.
        key = tl.load(keys + block + in_block, mask=is_seen[:, None], other=0.0)
        value = tl.load(values + block + in_block, mask=is_seen[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        if IS_CAPPED:
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
        score = tl.where(is_seen[None, :], score, float("-inf"))
        highest = tl.maximum(maximum, tl.max(score, 1))
        kept = tl.exp(maximum - highest)
        weight = tl.exp(score - highest[:, None])
        total = total * kept + tl.sum(weight, 1)
        part = tl.dot(weight.to(value.dtype), value, part * kept[:, None])
        maximum = highest
    at = head * num_splits + number
    tl.store(maxima + at, maximum, mask=is_row)
    tl.store(sums + at, total, mask=is_row)
    tl.store(parts + at[:, None] * SIZE + feature[None, :], part, mask=is_row[:, None])


@triton.jit(do_not_specialize=[*VARYING, "sinks"])
def combine_splits(
    attended, parts, maxima, sums, sinks, used, heads, num_splits, window,
    HAS_SINKS: tl.constexpr, IS_WINDOWED: tl.constexpr,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Of one sequence and head, ``SPLITS`` at a time; of those that no program has written none is looked at."""
    row = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    end = tl.load(used + tl.program_id(0))
    num_written = tl.cdiv(end, SPLIT) - _first_key(end, window, IS_WINDOWED) // SPLIT
    feature = tl.arange(0, SIZE)
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        total = tl.full((), 1.0, tl.float32)
    found = tl.zeros((SIZE,), tl.float32)
    for start in range(0, num_written, SPLITS):
        number = start + tl.arange(0, SPLITS)
        is_written = number < num_written
        at = row * num_splits + number
        maximum_each = tl.load(maxima + at, mask=is_written, other=float("-inf"))
        total_each = tl.load(sums + at, mask=is_written, other=0.0)
        part = tl.load(parts + at[:, None] * SIZE + feature[None, :], mask=is_written[:, None], other=0.0)
        highest = tl.maximum(maximum, tl.max(maximum_each, 0))
        kept = tl.exp(maximum - highest)
        weight = tl.exp(maximum_each - highest)
        total = total * kept + tl.sum(weight * total_each, 0)
        found = found * kept + tl.sum(weight[:, None] * part, 0)
        maximum = highest
    # A row without keys is there for the shape alone: zeros.
    found = found / tl.where(total == 0.0, 1.0, total)
    tl.store(attended + row * SIZE + feature, found.to(attended.dtype.element_ty))
