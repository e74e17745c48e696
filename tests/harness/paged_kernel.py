"""A stand-in for ``torch.nn.attention.varlen.varlen_attn`` with a table of pages: as it is documented, page by page.

Single queries are attended as the sampler does it on a CPU, so that both give the same bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from twinkle.module.paged_varlen import PagedKernel
from twinkle.module.scaled_attention import AttentionForm, attend


class PagedFunction:
    """Counts its calls. The last query of a sequence sees its last key.

    It multiplies what lies behind a sequence's end in its pages by nothing and adds it, as a kernel may that loads
    whole pages: a number changes nothing, NaN does.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """The attended values [T, H, D]."""
        self.num_calls += 1
        assert window_size[1] == 0
        assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
        assert enable_gqa == (query.shape[1] != key.shape[2])
        assert key.is_contiguous() and value.is_contiguous() and block_table.stride(-1) == 1
        form = AttentionForm(scale, window=None if window_size[0] < 0 else window_size[0] + 1)
        attended = []
        # As a kernel, it lets the host wait for nothing.
        rows = zip(pairwise(cu_seq_q.numpy().tolist()), seqused_k.numpy().tolist(), block_table, strict=True)
        for (start, end), used, pages in rows:
            assert end - start <= max_q and used <= max_k
            num_pages = -(-used // key.shape[1])
            lying = [side[pages[:num_pages]].flatten(0, 1) for side in (key, value)]
            first = form.first_key(used - end + start)
            keys, values = (side[first:used].transpose(0, 1)[None] for side in lying)
            if end - start == 1:
                grouped = query[start].reshape(1, key.shape[2], -1, query.shape[2])
                own = attend(grouped, keys, values, form=form).transpose(1, 2).reshape(1, query.shape[1], -1)
            else:
                is_causal = used == end - start and form.first_key(used - 1) == 0
                mask = None if is_causal else form.mask(used - end + start, used, first, query.device)
                queries = query[start:end].transpose(0, 1)[None]
                own = attend(queries, keys, values, form=form, mask=mask, is_causal=is_causal)[0]
            attended.append(own + (lying[1][used:] * 0).sum())
        return torch.cat(attended)


def paged_kernel() -> PagedKernel:
    """One that counts from zero."""
    return PagedKernel(PagedFunction(), wants_ends=False)
