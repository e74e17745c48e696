"""A stand-in for ``torch.nn.attention.varlen.varlen_attn`` with a table of pages: as it is documented, page by page.

Single queries are attended as the sampler does it on a CPU, so that both give the same bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from harness.recorded import as_one
from twinkle.module.paged_decode import DecodeKernel
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


class SingleKernel(DecodeKernel):
    """A stand-in for our own kernel, of single queries: in every form but chunks, with the bits of attention alone."""

    def __init__(self) -> None:
        super().__init__(kernels=None)
        object.__setattr__(self, "num_calls", 0)

    def attend(
        self,
        query_SHD: torch.Tensor,
        key_NPGD: torch.Tensor,
        value_NPGD: torch.Tensor,
        *,
        used_S: torch.Tensor,
        table_SM: torch.Tensor,
        form: AttentionForm,
    ) -> torch.Tensor:
        """The attended values [1, S, H, D]; zeros of no keys."""
        object.__setattr__(self, "num_calls", self.num_calls + 1)
        assert used_S.dtype == table_SM.dtype == torch.int32 and form.chunk is None
        return as_one(_attend_single, query_SHD, key_NPGD, value_NPGD, used_S, table_SM, form)


def _attend_single(
    query_SHD: torch.Tensor,
    key_NPGD: torch.Tensor,
    value_NPGD: torch.Tensor,
    used_S: torch.Tensor,
    table_SM: torch.Tensor,
    form: AttentionForm,
) -> torch.Tensor:
    page_tokens, num_groups = key_NPGD.shape[1:3]
    attended = torch.zeros_like(query_SHD)
    for row, used in enumerate(used_S.numpy().tolist()):
        if used:
            pages = table_SM[row, : -(-used // page_tokens)]
            first = form.first_key(used - 1)
            keys, values = (
                side[pages].flatten(0, 1)[first:used].transpose(0, 1)[None] for side in (key_NPGD, value_NPGD)
            )
            grouped = query_SHD[row].reshape(1, num_groups, -1, query_SHD.shape[2])
            attended[row] = attend(grouped, keys, values, form=form).transpose(1, 2).reshape(attended[row].shape)
    return attended[None]
