"""Attention of many packed sequences in one call, where torch has a kernel for it.

A call for each sequence costs launches, and plans for every new length. With one split of the keys the values of a
sequence are the same bits in any company (``torch.nn.attention.varlen``); for gradients nothing is promised. Only some
kernels can be told so: FlashAttention 3, where it is switched on. FlashAttention 2, which torch brings along, refuses,
and by its source splits no keys of packed sequences; so a call is tried in both ways.

Shapes: H query heads, G key/value heads, T packed tokens (of queries, or of keys), S sequences, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Protocol

import torch

from twinkle.infra.sending import send
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.tried import first_right, is_quick

MODULE = "torch.nn.attention.varlen"
NONE = f"torch {torch.__version__} has no {MODULE}"
TOLERANCE = 0.05
"""Of values about 1 in half precision."""


class Kernel(Protocol):
    """``torch.nn.attention.varlen.varlen_attn``, which has been told about splits what it can be told."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> torch.Tensor:
        """The attended values [T, H, D]."""
        ...


class Ends:
    """From 0 on where sequences end in a packed row, and how long the longest is."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.ends_S = send([0, *accumulate(lengths)], torch.int32, device)
        self.longest = max(lengths)


def attend_packed(
    kernel: Kernel,
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    *,
    queries: Ends,
    keys: Ends,
    form: AttentionForm,
) -> torch.Tensor:
    """The attended values [1, T, H, D], causally within each sequence, whose last query sees its last key."""
    attended_THD = kernel(
        query_THD,
        key_TGD,
        value_TGD,
        queries.ends_S,
        keys.ends_S,
        queries.longest,
        keys.longest,
        scale=form.scale,
        # How many before itself each sees, and after itself.
        window_size=(-1 if form.window is None else form.window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
    )
    return attended_THD[None]


class PackedSequences:
    """Where the sequences of a packed row end, told to the device once a pass for each width of chunks."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = lengths
        self._device = device
        self._ends: dict[int | None, Ends] = {}

    def attend(
        self,
        kernel: Kernel,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        form: AttentionForm,
    ) -> torch.Tensor:
        """The attended values [1, T, H, D], causally within each sequence."""
        ends = self._ends_of(form.chunk)
        # Not by an index, whose gradient is memory filled twice.
        rows = (each.squeeze(0).transpose(0, 1) for each in (query_1HTD, key_1GTD, value_1GTD))
        return attend_packed(kernel, *rows, queries=ends, keys=ends, form=form)

    def _ends_of(self, chunk: int | None) -> Ends:
        """Chunks, which see nothing before them, are sequences."""
        if chunk not in self._ends:
            lengths = list(self._lengths)
            if chunk is not None:
                lengths = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
            self._ends[chunk] = Ends(lengths, self._device)
        return self._ends[chunk]


def kernel_for(query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, form: AttentionForm) -> Kernel | None:
    """The kernel that does this, if there is one; a cap and sinks are known to none."""
    if form.cap is not None or form.sinks is not None:
        return None
    head_size = query_1HTD.shape[-1]
    is_shared = query_1HTD.shape[1] != key_1GTD.shape[1]
    return _tried(query_1HTD.device.type, query_1HTD.dtype, head_size, is_shared, form.window is not None)


@cache
def _tried(device_type: str, dtype: torch.dtype, head_size: int, is_shared: bool, is_windowed: bool) -> Kernel | None:
    """torch's kernel, if it does such a call there and back; says once if not."""
    return first_right(
        ways_to_call(torch_kernel(device_type, dtype)),
        lambda kernel: _failure(kernel, torch.device(device_type), dtype, head_size, is_shared, is_windowed),
        device_type=device_type,
        dtype=dtype,
        head_size=head_size,
        event="device.no_packed_attention_kernel",
        none=NONE,
        instead="sequences are attended one by one, slower",
    )


def torch_kernel(device_type: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """What torch has for packed sequences on a device; none if that is no device for it."""
    if not is_quick(device_type, dtype) or find_spec(MODULE) is None:
        return None
    function: Callable[..., torch.Tensor] = import_module(MODULE).varlen_attn
    return function


def ways_to_call(function: Callable[..., torch.Tensor] | None) -> list[Callable[..., torch.Tensor]]:
    """With the splits told, without, for kernels that have none, and without a word of shared heads."""
    return [] if function is None else [partial(function, num_splits=1), function, partial(_sharing_unasked, function)]


def _sharing_unasked(function: Callable[..., torch.Tensor], *sides: object, **options: object) -> torch.Tensor:
    """The call as torch 2.11 takes it: it knows no ``enable_gqa``, and its kernel shares heads by their numbers."""
    return function(*sides, **{name: value for name, value in options.items() if name != "enable_gqa"})


def _failure(
    kernel: Callable[..., torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    is_shared: bool,
    is_windowed: bool,
) -> Exception | None:
    """Why a call cannot be made, or gives something else: all tokens of two sequences, then the last two of each."""
    sizes = (2, 1 if is_shared else 2)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        query, key = (torch.randn(1, heads, 10, head_size, generator=generator).to(device, dtype) for heads in sizes)
        query.requires_grad_(True)
        form = AttentionForm(head_size**-0.5, window=2 if is_windowed else None)
        try:
            attended = PackedSequences([4, 6], device).attend(kernel, query, key, key, form)
            attended.backward(torch.ones_like(attended))
            rows = [2, 3, 8, 9]
            last_queries, keys = query.detach()[0].transpose(0, 1)[rows], key[0].transpose(0, 1)
            last = attend_packed(
                kernel, last_queries, keys, keys, queries=Ends([2, 2], device), keys=Ends([4, 6], device), form=form
            )
        except (RuntimeError, TypeError, ValueError) as error:  # as torch says that it knows no such call
            return error
        expected = [
            attend(
                *(each[:, :, start:end] for each in (query, key, key)), form=form, mask=form.mask(0, size, 0, device)
            )
            for start, end, size in ((0, 4, 4), (4, 10, 6))
        ]
        right = torch.cat(expected, dim=1)
    if (attended - right).abs().max() > TOLERANCE or (last - right[:, rows]).abs().max() > TOLERANCE:
        return ArithmeticError("its values are not those of attention sequence by sequence")
    return None
