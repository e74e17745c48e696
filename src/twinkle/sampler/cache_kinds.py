"""Which cache a model is sampled with: pages where one call attends to all sequences, else contiguous buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from twinkle.infra.device_memory import DeviceMemory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import Segment
from twinkle.module.paged_decode import decode_kernel_for
from twinkle.module.paged_varlen import PAGE_TOKENS, paged_kernel_for
from twinkle.module.scaled_attention import AttentionForm
from twinkle.module.tried import is_quick
from twinkle.module.varlen import kernel_for
from twinkle.sampler.attention import CachedAttention
from twinkle.sampler.caches import Cache, Caches, CachingAttention, Piece, bytes_of_states
from twinkle.sampler.kv_cache import BLOCK_TOKENS, SequenceCache
from twinkle.sampler.paged_attention import PagedAttention
from twinkle.sampler.paged_cache import PagedCache
from twinkle.sampler.pages import PagePool


class ContiguousCaches:
    """Each sequence has buffers of its own."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> SequenceCache:
        """See :class:`Caches`."""
        return SequenceCache()

    def attention(self, pieces: Sequence[Piece[Cache]]) -> CachingAttention:
        """See :class:`Caches`."""
        return CachedAttention(pieces, self._device)  # type: ignore[arg-type]  # all are made here

    def num_blocks(self, caches: Iterable[Cache]) -> int:
        """See :class:`Caches`."""
        return sum(cache.blocks for cache in caches)

    def num_held(self, every: Iterable[Cache]) -> int:
        """See :class:`Caches`."""
        return self.num_blocks(every)

    def size_bytes(self, every: Iterable[Cache]) -> int:
        """See :class:`Caches`."""
        return sum(cache.size_bytes for cache in every if isinstance(cache, SequenceCache))

    @property
    def shared_bytes(self) -> int:
        """See :class:`Caches`."""
        return 0

    def live_in(self, memory: DeviceMemory, *, num_blocks: int, kept_bytes: int) -> None:
        """See :class:`Caches`."""

    def give_back_unused(self) -> None:
        """See :class:`Caches`."""


class PagedCaches:
    """Sequences share the pages of one pool.

    What nobody has of the pool's memory is a guest of the device.
    """

    def __init__(self, device: torch.device, *, page_tokens: int = PAGE_TOKENS) -> None:
        self.block_tokens = page_tokens
        self.pool = PagePool(page_tokens)
        self._device = device

    def new(self) -> PagedCache:
        """See :class:`Caches`."""
        return PagedCache(self.pool)

    def attention(self, pieces: Sequence[Piece[Cache]]) -> CachingAttention:
        """See :class:`Caches`."""
        return PagedAttention(self.pool, pieces, self._device)  # type: ignore[arg-type]  # all are made here

    def num_blocks(self, caches: Iterable[Cache]) -> int:
        """See :class:`Caches`."""
        return len({page for cache in caches if isinstance(cache, PagedCache) for page in cache.pages})

    def num_held(self, every: Iterable[Cache]) -> int:
        """See :class:`Caches`; the pool counts."""
        del every
        return self.pool.num_owned

    def size_bytes(self, every: Iterable[Cache]) -> int:
        """See :class:`Caches`."""
        return self.pool.num_owned * self.pool.page_bytes + sum(bytes_of_states(cache.states) for cache in every)

    @property
    def shared_bytes(self) -> int:
        """See :class:`Caches`: pages that a sequence reads, too, and those that several chunks lie in."""
        return (self.pool.num_keepers - self.pool.num_kept_only) * self.pool.page_bytes

    def live_in(self, memory: DeviceMemory, *, num_blocks: int, kept_bytes: int) -> None:
        """See :class:`Caches`."""
        self.pool.live_in(memory, num_pages=num_blocks, kept_bytes=kept_bytes)

    def give_back_unused(self) -> None:
        """See :class:`Caches`."""
        self.pool.trim()


class _Asking(CachedAttention):
    """Attends as ever, and asks whether there is a kernel for all sequences of any layer."""

    has_kernel = False

    def __call__(
        self,
        layer_index: int,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        *,
        form: AttentionForm,
    ) -> torch.Tensor:
        self.has_kernel |= form.chunk is None and (
            decode_kernel_for(query_1HTD, key_1GTD, form) is not None
            or paged_kernel_for(query_1HTD, key_1GTD, form) is not None
            or kernel_for(query_1HTD, key_1GTD, form) is not None
        )
        return super().__call__(layer_index, query_1HTD, key_1GTD, value_1GTD, form=form)


@torch.inference_mode()
def caches_for(model: FusedLoraModel) -> Caches:
    """Returns pages where some layer has a kernel for packed sequences, which a pass over one token finds out."""
    if is_quick(model.device.type, model.dtype):
        cache = SequenceCache()
        cache.reserve(1)
        token = torch.zeros(1, dtype=torch.int64, device=model.device)
        asking = _Asking([Piece(cache, 0, 1)], model.device)
        model.run_packed(token, token, [Segment(None, 0, 1)], asking)
        if asking.has_kernel:
            return PagedCaches(model.device)
    return ContiguousCaches(model.device)
