"""Turns that a stronger model says again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.conversation import user_data_get
from twinkle_agentic.preprocessor.base import KEY_ROUNDS, QualityFilter, Row, calls_of, messages_of
from twinkle_agentic.preprocessor.llm_backend import MAX_THREADS, LLMBackend, OpenAIBackend, chosen_backend


class ResponseRefiner(QualityFilter):
    """Has the turns that train (``key_rounds`` of ``user_data``) answered again, and keeps the new answers.

    Turns of one row are answered in their order, each after those answered before it; the rows together, in one call
    for each number of the turn. A turn that calls tools stays, since what follows answers its calls; so does one to
    which no answer comes. ``refined`` notes how many turns of a row are new.

    Args:
        backend: The stronger model: a sampler with a template set, or an :class:`LLMBackend`.
        temperature: Of its answers.
        max_tokens: Of an answer.
        max_workers: Requests at once, to a model behind an address.
        api_endpoint: A server of OpenAI's protocol in place of a backend.
        model: Its name there.
        api_key: For it.
        keep_if_no_key_rounds: Keep rows that name no such turns; they are dropped otherwise.
    """

    adds = ("refined",)

    def __init__(
        self,
        backend: Any = None,
        temperature: float = 0.6,
        max_tokens: int = 4096,
        max_workers: int = MAX_THREADS,
        api_endpoint: str = "",
        model: str = "default",
        api_key: str = "",
        *,
        keep_if_no_key_rounds: bool = False,
    ) -> None:
        super().__init__()
        if max_tokens < 1:
            raise InvalidInput("max_tokens", f"is {max_tokens}; send 1 or more")
        if max_workers < 1:
            raise InvalidInput("max_workers", f"is {max_workers}; send 1 or more")
        self._backend = chosen_backend(backend, api_endpoint=api_endpoint, model=model, api_key=api_key)
        self._params: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
        if isinstance(self._backend, OpenAIBackend):
            self._params["max_workers"] = max_workers
        self._keeps_others = keep_if_no_key_rounds

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """See :class:`QualityFilter`."""
        self.take_left()
        kept: list[dict[str, Any]] = []
        turns: list[list[int]] = []
        for row in rows:
            named = user_data_get(row.get("user_data"), KEY_ROUNDS)
            if not named and not self._keeps_others:
                self.leave(row, "no key rounds")
                continue
            messages = [dict(message) for message in messages_of(row)]
            kept.append({**row, "messages": messages, "refined": 0})
            turns.append(sorted(number for number in set(named or ()) if _can_be_refined(messages, number)))
        for turn in range(max(map(len, turns), default=0)):
            self._refine(
                [(row, numbers[turn]) for row, numbers in zip(kept, turns, strict=True) if turn < len(numbers)]
            )
        return list(kept)

    def _refine(self, batch: Sequence[tuple[dict[str, Any], int]]) -> None:
        asked = [row["messages"][:number] for row, number in batch]
        for (row, number), choices in zip(batch, self._answers(asked), strict=True):
            if choices and choices[0]["content"].strip():
                old = row["messages"][number]
                others = {name: value for name, value in old.items() if name != "reasoning_content"}
                row["messages"][number] = {**others, **choices[0]}
                row["refined"] += 1

    def _answers(self, asked: list[Any]) -> list[list[dict[str, str]]]:
        backend: LLMBackend = self._backend
        return backend.chat_batch(asked, **self._params)


def _can_be_refined(messages: Sequence[Row], number: int) -> bool:
    if not 0 < number < len(messages):
        return False
    return messages[number].get("role") == "assistant" and not calls_of(messages[number])
