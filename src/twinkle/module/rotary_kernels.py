"""Queries and keys turned by their positions in one launch, in Triton: as models write it that takes ten."""

from __future__ import annotations

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def turn(
    x_0, x_1, y_0, y_1, cosines, sines, token_stride_0, token_stride_1, head_stride_0, head_stride_1,
    cosine_stride, sine_stride, heads_0, heads_1, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """``y = x * cos + rotated(x) * sin``, or ``BACK`` the gradient of that, of one token and either queries or keys.

    ``rotated`` is the second half, negative, before the first. ``y`` lies token by token, head by head.
    """
    token = tl.program_id(0).to(tl.int64)
    is_key = tl.program_id(1)
    x, y = x_0, y_0
    if is_key == 1:
        x, y = x_1, y_1
    # Not in the branch: a number that is 1 is a constant to the compiler, of another type.
    heads = heads_0 + is_key * (heads_1 - heads_0)
    token_stride = token_stride_0 + is_key * (token_stride_1 - token_stride_0)
    head_stride = head_stride_0 + is_key * (head_stride_1 - head_stride_0)
    head = tl.arange(0, HEADS)
    feature = tl.arange(0, HALF)
    is_feature = feature < half
    is_there = (head < heads)[:, None] & is_feature[None, :]
    place = x + token * token_stride + head[:, None] * head_stride + feature[None, :]
    first = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=is_there, other=0.0).to(tl.float32)
    cosine = cosines + token * cosine_stride + feature
    sine = sines + token * sine_stride + feature
    cosine_1 = tl.load(cosine, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    cosine_2 = tl.load(cosine + half, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    sine_1 = tl.load(sine, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    sine_2 = tl.load(sine + half, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    if BACK:
        turned_1 = first * cosine_1 + second * sine_2
        turned_2 = second * cosine_2 - first * sine_1
    else:
        turned_1 = first * cosine_1 - second * sine_1
        turned_2 = second * cosine_2 + first * sine_2
    there = y + (token * heads + head[:, None]) * (2 * half) + feature[None, :]
    tl.store(there, turned_1.to(y.dtype.element_ty), mask=is_there)
    tl.store(there + half, turned_2.to(y.dtype.element_ty), mask=is_there)
