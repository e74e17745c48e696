"""A stand-in for ``torch.nn.attention.varlen.varlen_attn``, which only GPUs have: as it is documented, by masks."""

from __future__ import annotations

from itertools import pairwise

import torch

from twinkle.module.scaled_attention import AttentionForm, attend


class VarlenKernel:
    """Counts its calls. The last query of a sequence sees its last key."""

    def __init__(self) -> None:
        self.num_calls = 0

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
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """The attended values [T, H, D]."""
        self.num_calls += 1
        assert num_splits in (None, 1)
        assert window_size[1] == 0
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        form = AttentionForm(scale, window=None if window_size[0] < 0 else window_size[0] + 1)
        attended = []
        for (start, end), (first, last) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
            num_queries, num_keys = end - start, last - first
            assert num_queries <= max_q and num_keys <= max_k
            rows = [each.transpose(0, 1)[None] for each in (query[start:end], key[first:last], value[first:last])]
            mask = form.mask(num_keys - num_queries, num_keys, 0, query.device)
            attended.append(attend(*rows, form=form, mask=mask)[0])
        return torch.cat(attended)
