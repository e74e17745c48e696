"""Attention of some queries of one sequence over keys of the same, in every form that a served model asks for.

Forms beyond the plain one are brought to it, so that the kernels that never hold all scores at once do them too: a
sink is one more key. A cap has no kernel; it is computed block by block of queries, and once more going back.

Shapes: H query heads, G key/value heads, N queries, B those of a block, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from twinkle.core.process.events import event_log

_log = event_log()

SINK_FEATURES = 8
"""Features added to queries and keys for a sink, of which one is used: the kernels want a multiple."""
QUERIES_PER_BLOCK = 256


@dataclass(frozen=True, eq=False)
class AttentionForm:
    """What a layer asks of attention.

    Args:
        scale: Of the products of queries and keys.
        window: How many positions each sees, itself included; None means all before it.
        chunk: Positions see those of their own chunk of this width only; None means no chunks.
        cap: Scores are ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118); None leaves them.
        sinks: By head [H] a score that takes its share of the softmax and gives nothing (arXiv 2309.17453).
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sinks: torch.Tensor | None = None

    def first_key(self, position: int) -> int:
        """The first position that a token at ``position`` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position - position % self.chunk

    def mask(self, start: int, end: int, first_key: int, device: torch.device) -> torch.Tensor:
        """Which of the positions ``first_key:end`` (columns) those of ``start:end`` (rows) see, as booleans [N, S]."""
        queries_N1 = torch.arange(start, end, device=device)[:, None]
        keys_S = torch.arange(first_key, end, device=device)
        seen_NS = keys_S <= queries_N1
        if self.window is not None:
            seen_NS &= keys_S > queries_N1 - self.window
        if self.chunk is not None:
            seen_NS &= keys_S >= queries_N1 - queries_N1 % self.chunk
        return seen_NS


def attend(
    query_1HND: torch.Tensor,
    key_1GSD: torch.Tensor,
    value_1GSD: torch.Tensor,
    *,
    form: AttentionForm,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return the attended values as [1, N, H, D].

    Queries of heads that share keys may come as rows of one head: [1, G, H / G, D].

    Args:
        query_1HND: Rotated already, like the keys.
        key_1GSD: The keys.
        value_1GSD: The values, of the keys' size.
        form: Its scale, cap and sinks count here; windows and chunks are in the mask.
        mask: As ``form.mask`` makes it; None means that every query sees all keys,
        is_causal: or, with as many keys as queries, those up to its own.
    """
    if form.cap is not None and form.sinks is not None:
        raise NotImplementedError("attention with a cap and with sinks")
    size, added = value_1GSD.shape[-1], 0
    if form.sinks is not None:
        added = int(is_causal)
        mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
        query_1HND, key_1GSD, value_1GSD = _with_sink(query_1HND, key_1GSD, value_1GSD, form, added)
    if form.cap is not None or not has_kernel(query_1HND.device.type, query_1HND.dtype):
        attended_1NHD = _composed(query_1HND, key_1GSD, value_1GSD, form, mask, is_causal)
    else:
        attended_1NHD = functional.scaled_dot_product_attention(
            query_1HND,
            key_1GSD,
            value_1GSD,
            attn_mask=mask,
            is_causal=is_causal,
            scale=form.scale,
            enable_gqa=query_1HND.shape[1] != key_1GSD.shape[1],
        ).transpose(1, 2)
    return attended_1NHD if form.sinks is None else attended_1NHD[:, added:, :, :size]


@cache
def has_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch has attention for a device, with heads that share keys; says once if not."""
    query_1HND, key_1GSD = (torch.ones(1, heads, 2, 8, dtype=dtype, device=device_type) for heads in (2, 1))
    try:
        functional.scaled_dot_product_attention(query_1HND, key_1GSD, key_1GSD, is_causal=True, enable_gqa=True)
    except (RuntimeError, TypeError) as error:
        _log.warning(
            "device.no_attention_kernel",
            device=device_type,
            dtype=str(dtype),
            reason=str(error).partition("\n")[0],
            next="attention is composed of plain products, slower",
        )
        return False
    return True


def _with_sink(
    query_1HND: torch.Tensor, key_1GSD: torch.Tensor, value_1GSD: torch.Tensor, form: AttentionForm, added: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with a key in front whose score is each head's sink and whose value is nothing.

    The score is carried by one more feature, in which this key alone is one. For a causal kernel there is a query in
    front, too (``added``), so that it sees this key first.
    """
    assert form.sinks is not None
    num_heads, num_queries = query_1HND.shape[1:3]
    per_group = form.sinks.numel() // num_heads  # more than one where heads come as rows
    sinks_1HN1 = (form.sinks / form.scale).to(query_1HND.dtype).view(1, num_heads, per_group, 1)
    query_1HND = torch.cat((query_1HND, sinks_1HN1.expand(-1, -1, num_queries, -1)), dim=-1)
    query_1HND = functional.pad(query_1HND, (0, SINK_FEATURES - 1, added, 0))
    sink_key_D = torch.zeros(key_1GSD.shape[-1] + SINK_FEATURES, dtype=key_1GSD.dtype, device=key_1GSD.device)
    sink_key_D[key_1GSD.shape[-1]] = 1
    keys = functional.pad(key_1GSD, (0, SINK_FEATURES))
    keys = torch.cat((sink_key_D.expand(1, keys.shape[1], 1, -1), keys), dim=2)
    return query_1HND, keys, functional.pad(value_1GSD, (0, SINK_FEATURES, 1, 0))


def _composed(
    query_1HND: torch.Tensor,
    key_1GSD: torch.Tensor,
    value_1GSD: torch.Tensor,
    form: AttentionForm,
    mask_NS: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    attended: list[torch.Tensor] = []
    num_keys, start, end = key_1GSD.shape[2], 0, 0
    for query_1HBD in query_1HND.split(QUERIES_PER_BLOCK, dim=2):
        start, end = end, end + query_1HBD.shape[2]
        last = end if is_causal else num_keys
        if is_causal:
            mask_BS: torch.Tensor | None = AttentionForm(form.scale).mask(start, end, 0, query_1HND.device)
        else:
            mask_BS = None if mask_NS is None else mask_NS[start:end]
        block = (query_1HBD, key_1GSD[:, :, :last], value_1GSD[:, :, :last], form, mask_BS)
        is_kept = torch.is_grad_enabled() and query_1HND.requires_grad
        attended.append(checkpoint(_block, *block, use_reentrant=False) if is_kept else _block(*block))
    return torch.cat(attended, dim=1) if len(attended) > 1 else attended[0]


def _block(
    query_1HBD: torch.Tensor,
    key_1GSD: torch.Tensor,
    value_1GSD: torch.Tensor,
    form: AttentionForm,
    mask_BS: torch.Tensor | None,
) -> torch.Tensor:
    _, num_heads, num_queries, size = query_1HBD.shape
    num_groups, num_keys = key_1GSD.shape[1:3]
    rows = query_1HBD.reshape(1, num_groups, -1, size)  # heads that share keys become rows: keys are not repeated
    scores = (rows @ key_1GSD.transpose(2, 3)) * form.scale
    if form.cap is not None:
        scores = (scores / form.cap).tanh() * form.cap
    scores = scores.view(1, num_heads, num_queries, num_keys)
    if mask_BS is not None:
        scores = scores.masked_fill(~mask_BS, -torch.inf)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value_1GSD.dtype)
    attended = shares.view(1, num_groups, -1, num_keys) @ value_1GSD
    return attended.view(1, num_heads, num_queries, size).transpose(1, 2)
