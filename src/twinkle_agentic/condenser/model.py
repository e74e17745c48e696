"""Passages said briefly by a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle_agentic.condenser.base import Condenser
from twinkle_agentic.data_format.chunks import Chunk, Chunks

SYSTEM = (
    "You shorten passages for a reader who decides by your text whether to fetch the original. Keep the topic, names,"
    " numbers, dates and who did what; list in a last line what else the original tells. Add nothing. Use the passage's"
    " language."
)
USER = "Shorten to at most {budget} characters. The reader asks: {query}\n\n{text}"
NO_QUERY = "(nothing in particular)"
CHARACTERS_PER_TOKEN = 2
"""At the least, so that the budget of tokens does not cut an answer that keeps within its characters."""


@dataclass(frozen=True)
class _Job:
    """A passage to shorten, where it stands."""

    passages: list[Chunk]
    index: int
    query: str

    @property
    def chunk(self) -> Chunk:
        return self.passages[self.index]


class ModelCondenser(Condenser):
    """Each passage long enough is shortened by a model; what does not come out shorter stays.

    Args:
        sampler: With a template set, or one of a service.
        compression_ratio: How much shorter, above 1.
        sampling_params: In place of a greedy answer within the budget.
        system_prompt: In place of ours.
        user_prompt_template: In place of ours; with ``{budget}`` and ``{text}``, and ``{query}`` if wanted.
        min_chars: Of a passage that is shortened.
        min_budget_chars: That an answer may have in any case.
        skip_roles: Whose messages stay as they are.
        skip_pattern: Passages in which this regular expression is found stay as well.
        related_query: The question that a passage asks, for those after it; none if it asks none.
        rounds: The numbers of the messages to shorten; all if omitted.
        batch_size: Passages in one call; all if omitted.
        lora_path: An adapter to shorten with; the base model if omitted, also where the sampler's weights train.
    """

    def __init__(
        self,
        sampler: Any,
        compression_ratio: float = 2.0,
        *,
        sampling_params: Any = None,
        system_prompt: str | None = None,
        user_prompt_template: str | None = None,
        min_chars: int = 200,
        min_budget_chars: int = 250,
        skip_roles: Sequence[str] = ("system", "tool", "assistant"),
        skip_pattern: str | None = None,
        related_query: Callable[[Chunk], str | None] | None = None,
        rounds: Sequence[int] | None = None,
        batch_size: int | None = None,
        lora_path: str | None = None,
    ) -> None:
        if compression_ratio <= 1:
            raise InvalidInput("compression_ratio", f"is {compression_ratio}; send more than 1")
        if batch_size is not None and batch_size < 1:
            raise InvalidInput("batch_size", f"is {batch_size}; send 1 or more, or None")
        self._user = user_prompt_template or USER
        if "{budget}" not in self._user or "{text}" not in self._user:
            raise InvalidInput("user_prompt_template", "lacks {budget} or {text}")
        self._sampler = sampler
        self._ratio = compression_ratio
        self._params = sampling_params
        self._system = system_prompt or SYSTEM
        self._min_chars = min_chars
        self._min_budget = min_budget_chars
        self._skip_roles = frozenset(skip_roles)
        self._skip = re.compile(skip_pattern) if skip_pattern else None
        self._query_of = related_query
        self._rounds = None if rounds is None else frozenset(rounds)
        self._batch_size = batch_size
        self._call: Mapping[str, Any] = {"adapter_path": lora_path} if lora_path else {"use_base_model": True}

    def __call__(self, chunks: Chunks, **kwargs: Any) -> Chunks:
        """The conversation with its passages shortened."""
        return self.condense_many([chunks], **kwargs)[0]

    def condense_many(self, conversations: Sequence[Chunks], **kwargs: Any) -> list[Chunks]:
        """The conversations with their passages shortened, in as few calls of the sampler as their number allows."""
        passages = [list(chunks) for chunks in conversations]
        jobs: list[_Job] = []
        for of_one in passages:
            query = None
            for index, chunk in enumerate(of_one):
                query = (self._query_of(chunk) if self._query_of else None) or query
                if self._is_wanted(chunk):
                    jobs.append(_Job(of_one, index, query or NO_QUERY))
        size = self._batch_size or max(1, len(jobs))
        for start in range(0, len(jobs), size):
            batch = jobs[start : start + size]
            for job, text in zip(batch, self._shorten(batch), strict=True):
                if 0 < len(text) < len(job.chunk.content):
                    job.passages[job.index] = job.chunk.condensed(text)
        return [chunks.replaced(of_one) for chunks, of_one in zip(conversations, passages, strict=True)]

    def _is_wanted(self, chunk: Chunk) -> bool:
        return (
            chunk.role not in self._skip_roles
            and (self._rounds is None or chunk.round in self._rounds)
            and len(chunk.content) >= self._min_chars
            and self._budget(chunk) < len(chunk.content)
            and not (self._skip and self._skip.search(chunk.content))
        )

    def _budget(self, chunk: Chunk) -> int:
        return max(self._min_budget, math.ceil(len(chunk.content) / self._ratio))

    def _shorten(self, batch: Sequence[_Job]) -> list[str]:
        budgets = [self._budget(job.chunk) for job in batch]
        prompts = [
            {
                "messages": [
                    {"role": "system", "content": self._system},
                    {
                        "role": "user",
                        "content": self._user.replace("{budget}", str(budget))
                        .replace("{query}", job.query)
                        .replace("{text}", job.chunk.content),
                    },
                ]
            }
            for job, budget in zip(batch, budgets, strict=True)
        ]
        params = self._params or {"max_tokens": max(budgets) // CHARACTERS_PER_TOKEN, "temperature": 0.0}
        responses = self._sampler.sample(prompts, params, **self._call)
        return [_text(response["sequences"][0]) for response in responses]


def _text(sequence: Any) -> str:
    """What was said, without the tokens that end it where the sampler tells the message."""
    messages = (sequence.get("new_input_feature") or {}).get("messages") or []
    said = messages[-1].get("content") if messages else sequence.get("decoded")
    return str(said or "").strip()
