"""Keys, values and states of computed prompts, kept for requests that begin alike: groups of samples, system prompts.

A prompt is cut at fixed positions, so what a chunk leaves behind depends on the weights and on the tokens up to its end
alone, bit by bit. A request that has the same tokens there may therefore take it instead of computing it. But whoever
finds a prompt computed already learns that somebody has sent it, so requests share within their group alone.

A chunk also holds what layers with a memory remember at its end, the only place where one can go on from it: a prompt
is taken over up to the last chunk that it shares, and only the state of that one is needed.

Shapes: V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twinkle.infra.device_memory import DeviceMemory
from twinkle.model.pictures import Picture
from twinkle.module.lora import LoraAdapter
from twinkle.module.packed_states import LayerState
from twinkle.sampler.caches import Caches, KeptTokens, bytes_of_states


@dataclass(frozen=True)
class PromptChunk:
    """One chunk of a prompt, equal to another's where it leaves the same behind."""

    group: str
    weights: object
    digest: bytes
    """Of all tokens up to ``end``, the pictures among them, and of where they are cut."""
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class ComputedChunk:
    """What a chunk leaves behind."""

    tokens: KeptTokens
    """Keys and values."""
    states: Mapping[int, LayerState]
    """What layers with a memory remember after its last token; empty for models without."""
    next_logits: torch.Tensor | None
    """[V], where a prompt ended there."""

    @property
    def size_bytes(self) -> int:
        """Memory it holds, others' share in it aside."""
        of_logits = 0 if self.next_logits is None else self.next_logits.nbytes
        return self.tokens.size_bytes + bytes_of_states(self.states) + of_logits


def chunks_of(
    prompt: Sequence[int],
    adapter: LoraAdapter | None,
    *,
    group: str,
    chunk_tokens: int,
    pictures: Sequence[Picture] = (),
) -> list[PromptChunk]:
    """Cuts a prompt at multiples of ``chunk_tokens``, for requests of ``group`` alone.

    All tokens of pictures are alike, so a chunk is told from others by the pictures that begin in it or before it, too.
    """
    weights = None if adapter is None else adapter.version
    token_ids = np.array(prompt, dtype=np.int64)
    digest = hashlib.sha256()
    chunks = []
    for start in range(0, len(prompt), chunk_tokens):
        end = min(start + chunk_tokens, len(prompt))
        digest.update(token_ids[start:end].tobytes())
        for picture in pictures:
            if start <= picture.start < end:
                digest.update(picture.digest)
        chunks.append(PromptChunk(group, weights, digest.digest(), start, end))
    return chunks


class PrefixCache:
    """Chunks by what they are, within ``max_bytes``; those not wanted for the longest time leave first.

    They are guests of the device's memory: they take of it what nobody else holds, and give way.
    """

    def __init__(self, max_bytes: int, memory: DeviceMemory, caches: Caches) -> None:
        self._max_bytes = max_bytes
        self._caches = caches
        self._memory = memory
        memory.add_guest("kept prompts", self)
        self._num_bytes = 0
        self._computed: OrderedDict[PromptChunk, ComputedChunk] = OrderedDict()

    def find(self, chunk: PromptChunk) -> ComputedChunk | None:
        """Returns what the chunk leaves behind, if that is known."""
        return self._computed.get(chunk)

    def keep(self, chunk: PromptChunk, computed: ComputedChunk) -> None:
        """Adds a chunk, or what was not known of one."""
        known = self._computed.get(chunk)
        if known is not None:
            self._num_bytes -= known.size_bytes
            known.tokens.release()
        self._num_bytes += computed.size_bytes
        self._computed[chunk] = computed
        self._shrink(max(0, min(self._max_bytes, self._num_bytes + self._memory.free_bytes)))

    @property
    def size_bytes(self) -> int:
        """What they hold of the device's memory, and nobody else."""
        return self._num_bytes - self._caches.shared_bytes

    def give_back(self, num_bytes: int) -> None:
        """Forget so many bytes, or all."""
        most = max(0, self.size_bytes - num_bytes)
        while self._computed and self.size_bytes > most:
            self._forget_oldest()
        self._caches.give_back_unused()

    def touch(self, chunks: Sequence[PromptChunk]) -> None:
        """Notes that the chunks of one prompt were wanted: a chunk is of no use without those before it."""
        for chunk in reversed(chunks):
            if chunk in self._computed:
                self._computed.move_to_end(chunk)

    def clear(self) -> None:
        """Forgets everything."""
        self._shrink(0)
        self._caches.give_back_unused()

    def _shrink(self, num_bytes: int) -> None:
        while self._num_bytes > num_bytes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, oldest = self._computed.popitem(last=False)
        self._num_bytes -= oldest.size_bytes
        oldest.tokens.release()
