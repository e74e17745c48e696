"""Attention of many packed sequences in one call, where torch has a kernel for it.

A call for each sequence costs launches, and plans for every new length. With one split of the keys the values of a
sequence are the same bits in any company (``torch.nn.attention.varlen``); for gradients nothing is promised.

Shapes: H query heads, G key/value heads, T packed tokens, S sequences, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Protocol

import torch

from twinkle.core.events import event_log
from twinkle.infra.sending import send
from twinkle.module.scaled_attention import AttentionForm

_log = event_log()

MODULE = "torch.nn.attention.varlen"
HALF = (torch.bfloat16, torch.float16)


class Kernel(Protocol):
    """``torch.nn.attention.varlen.varlen_attn``."""

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
        num_splits: int,
    ) -> torch.Tensor:
        """The attended values [T, H, D]."""
        ...


class PackedSequences:
    """Where the sequences of a packed row end, told to the device once a pass for each width of chunks."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = lengths
        self._device = device
        self._ends: dict[int | None, tuple[torch.Tensor, int]] = {}

    def attend(
        self,
        kernel: Kernel,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        form: AttentionForm,
    ) -> torch.Tensor:
        """The attended values [1, T, H, D], causally within each sequence."""
        ends_S, longest = self._ends_of(form.chunk)
        query_THD, key_TGD, value_TGD = (each[0].transpose(0, 1) for each in (query_1HTD, key_1GTD, value_1GTD))
        attended_THD = kernel(
            query_THD,
            key_TGD,
            value_TGD,
            ends_S,
            ends_S,
            longest,
            longest,
            scale=form.scale,
            # How many before itself each sees, and after itself.
            window_size=(-1 if form.window is None else form.window - 1, 0),
            enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
            num_splits=1,
        )
        return attended_THD[None]

    def _ends_of(self, chunk: int | None) -> tuple[torch.Tensor, int]:
        """From 0 on, where sequences end, and the longest; chunks, which see nothing before them, are sequences."""
        if chunk not in self._ends:
            lengths = list(self._lengths)
            if chunk is not None:
                lengths = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
            ends = [0, *accumulate(lengths)]
            self._ends[chunk] = send(ends, torch.int32, self._device), max(lengths)
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
    if device_type != "cuda" or dtype not in HALF:
        return None
    reason = f"torch {torch.__version__} has no {MODULE}"
    if find_spec(MODULE) is not None:
        kernel: Kernel = import_module(MODULE).varlen_attn
        failure = _failure(kernel, torch.device(device_type), dtype, head_size, is_shared, is_windowed)
        if failure is None:
            return kernel
        reason = str(failure).partition("\n")[0]
    _log.warning(
        "device.no_packed_attention_kernel",
        head_size=head_size,
        dtype=str(dtype),
        reason=reason,
        next="sequences are attended one by one, slower",
    )
    return None


def _failure(
    kernel: Callable[..., torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    is_shared: bool,
    is_windowed: bool,
) -> Exception | None:
    sizes = (2, 1 if is_shared else 2)
    with torch.inference_mode(False), torch.enable_grad():
        query, key = (torch.ones(1, heads, 5, head_size, dtype=dtype, device=device) for heads in sizes)
        query.requires_grad_(True)
        form = AttentionForm(1.0, window=2 if is_windowed else None)
        try:
            attended = PackedSequences([2, 3], device).attend(kernel, query, key, key, form)
            attended.sum().backward()
        except (RuntimeError, TypeError, ValueError) as error:  # as torch says that it knows no such call
            return error
    return None
