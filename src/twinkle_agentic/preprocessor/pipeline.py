"""Quality filters in a row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row
from twinkle_agentic.preprocessor.difficulty import PerplexityFilter
from twinkle_agentic.preprocessor.judges import IntentClassifier
from twinkle_agentic.preprocessor.language import LanguageFilter
from twinkle_agentic.preprocessor.loops import DeadLoopFilter, DedupFilter
from twinkle_agentic.preprocessor.near_duplicates import MinHashDedupFilter
from twinkle_agentic.preprocessor.rules import HardFilter, MessageSanityFilter, RefuseFilter, TokenNumFilter
from twinkle_agentic.preprocessor.shares import AlphanumericFilter, CharRepeatFilter, WordRepeatFilter
from twinkle_agentic.preprocessor.texts import (
    FixUnicodeFilter,
    MessageNormalizer,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenSoupFilter,
)

Stage = QualityFilter | Callable[[list[Row]], Any]
"""A filter, or whatever makes of a list of rows those that stay, or these and those that are dropped."""

Wanted = tuple[bool, Callable[[], QualityFilter]]
"""Whether a stage is wanted, and what makes it."""


class QualityPreprocessor(QualityFilter):
    """Mends, then drops, then names the intent; each stage sees what those before it left. ``report`` says how much.

    Args:
        pipeline: Stages of one's own, in their order, in place of ours; then the switches below have no effect.
        dropped_log_path: A file that rows which are dropped are added to, one a line as JSON, with ``dropped_by`` and
            ``dropped_for``. None is written without it.
        fix_unicode: See :class:`FixUnicodeFilter`.
        remove_repeat_sentences: See :class:`RemoveRepeatSentencesFilter`.
        message_sanity_filter: See :class:`MessageSanityFilter`.
        sensitive_words_file: For it.
        extra_sensitive_words: For it.
        hard_filter: See :class:`HardFilter`.
        allow_incomplete_role: For it.
        refuse_filter: See :class:`RefuseFilter`.
        dead_loop_filter: See :class:`DeadLoopFilter`.
        token_soup_filter: See :class:`TokenSoupFilter`.
        word_repeat_max_ratio: See :class:`WordRepeatFilter`; None for none.
        char_repeat_max_ratio: See :class:`CharRepeatFilter`; None for none.
        special_chars_filter: See :class:`SpecialCharsFilter`; off, since tables are made of signs.
        special_chars_max_ratio: For it.
        alphanumeric_min_ratio: See :class:`AlphanumericFilter`; None for none.
        token_num_filter: See :class:`TokenNumFilter`.
        count_tokens: For it.
        hf_tokenizer: The model whose tokenizer counts, in its place.
        token_num_min: For it.
        token_num_max: For it.
        language: See :class:`LanguageFilter`; empty for none.
        language_min_score: For it.
        dedup: See :class:`DedupFilter`.
        minhash_dedup: See :class:`MinHashDedupFilter`.
        jaccard_threshold: For it.
        backend: See :class:`PerplexityFilter`, which drops by this model; None for none.
        ppl_api_endpoint: A server for it in place of a backend.
        ppl_model: For it.
        ppl_tokenizer: For it: the model to make a template of; a sampler's own if empty.
        ppl_min: For it.
        ppl_max: For it.
        model_filter: Further filters that drop, last, such as :class:`ModelFilter` or :class:`JudgeFilter`; or one.
    """

    def __init__(
        self,
        pipeline: Sequence[Stage] | None = None,
        dropped_log_path: str | Path = "",
        *,
        fix_unicode: bool = True,
        remove_repeat_sentences: bool = True,
        message_sanity_filter: bool = True,
        sensitive_words_file: str | Path = "",
        extra_sensitive_words: Sequence[str] | None = (),
        hard_filter: bool = True,
        allow_incomplete_role: bool = False,
        refuse_filter: bool = True,
        dead_loop_filter: bool = True,
        token_soup_filter: bool = True,
        word_repeat_max_ratio: float | None = None,
        char_repeat_max_ratio: float | None = None,
        special_chars_filter: bool = False,
        special_chars_max_ratio: float = 0.5,
        alphanumeric_min_ratio: float | None = None,
        token_num_filter: bool = True,
        count_tokens: Callable[[str], int] | None = None,
        token_num_min: int = 10,
        token_num_max: int = 8192,
        hf_tokenizer: str = "",
        language: str | Sequence[str] = "",
        language_min_score: float = 0.7,
        dedup: bool = False,
        minhash_dedup: bool = False,
        jaccard_threshold: float = 0.7,
        backend: Any = None,
        ppl_api_endpoint: str = "",
        ppl_model: str = "default",
        ppl_tokenizer: str = "",
        ppl_min: float = 2.0,
        ppl_max: float = 100.0,
        model_filter: QualityFilter | Sequence[QualityFilter] = (),
    ) -> None:
        super().__init__()
        self._log_path = Path(dropped_log_path) if dropped_log_path else None
        if pipeline is not None:
            self.stages: list[Stage] = [_checked(number, stage) for number, stage in enumerate(pipeline)]
            self._notes_columns()
            return
        stages: list[Wanted] = [
            (True, MessageNormalizer),
            (fix_unicode, FixUnicodeFilter),
            # A loop must be seen before its repetitions are mended away.
            (dead_loop_filter, DeadLoopFilter),
            (remove_repeat_sentences, RemoveRepeatSentencesFilter),
            (
                message_sanity_filter,
                lambda: MessageSanityFilter(extra_sensitive_words or (), sensitive_words_file=sensitive_words_file),
            ),
            (hard_filter, lambda: HardFilter(allow_incomplete_role=allow_incomplete_role)),
            (refuse_filter, RefuseFilter),
            (token_soup_filter, TokenSoupFilter),
            *_of_share(word_repeat_max_ratio, char_repeat_max_ratio, alphanumeric_min_ratio),
            (special_chars_filter, lambda: SpecialCharsFilter(special_chars_max_ratio)),
            (
                token_num_filter,
                lambda: TokenNumFilter(count_tokens or hf_tokenizer or None, token_num_min, token_num_max),
            ),
            (bool(language), lambda: LanguageFilter(language, language_min_score)),
            (dedup, DedupFilter),
            (minhash_dedup, lambda: MinHashDedupFilter(jaccard_threshold=jaccard_threshold)),
            (
                backend is not None or bool(ppl_api_endpoint),
                lambda: PerplexityFilter(
                    backend,
                    None,
                    ppl_min,
                    ppl_max,
                    tokenizer_name_or_path=ppl_tokenizer,
                    api_endpoint=ppl_api_endpoint,
                    model=ppl_model,
                ),
            ),
        ]
        self.stages = [make() for is_wanted, make in stages if is_wanted]
        self.stages += [model_filter] if isinstance(model_filter, QualityFilter) else list(model_filter)
        self.stages.append(IntentClassifier())
        self._notes_columns()

    def _notes_columns(self) -> None:
        self._counts: list[Counter[str]] = [Counter() for _ in self.stages]
        noted = (name for stage in self.stages if isinstance(stage, QualityFilter) for name in stage.adds)
        self.adds = tuple(dict.fromkeys(noted))

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """See :class:`QualityFilter`."""
        left = list(rows)
        self.take_left()
        for number, stage in enumerate(self.stages):
            left, dropped = _sorted_by(stage, left)
            self._counts[number].update(str(row.get("dropped_for", "dropped")) for row in dropped)
            self._left += dropped
            self._log(dropped)
        self.dropped = sum(self._counts, Counter())
        return left

    def report(self) -> str:
        """How many rows each stage has dropped so far, and why, for people to read."""
        lines = [
            f"{_name(stage)}: {count} dropped, {reason}"
            for stage, counts in zip(self.stages, self._counts, strict=True)
            for reason, count in counts.most_common()
        ]
        return "\n".join(lines) or "nothing was dropped"

    def _log(self, dropped: Iterable[Row]) -> None:
        if self._log_path is None:
            return
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in dropped]
        if lines:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("a", encoding="utf-8") as file:
                file.writelines(lines)


def _of_share(words: float | None, characters: float | None, letters: float | None) -> list[Wanted]:
    """The stages that go by a share: each only where a bound is given."""
    return [
        (words is not None, lambda: WordRepeatFilter(max_ratio=words or 0.0)),
        (characters is not None, lambda: CharRepeatFilter(max_ratio=characters or 0.0)),
        (letters is not None, lambda: AlphanumericFilter(min_ratio=letters or 0.0)),
    ]


def _checked(number: int, stage: Any) -> Stage:
    if isinstance(stage, type) or not callable(stage):
        raise InvalidInput(f"pipeline[{number}]", f"is {stage!r}; send a filter that is made already, or a function")
    checked: Stage = stage
    return checked


def _sorted_by(stage: Stage, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """What a stage keeps and what it drops, which is noted where the stage itself tells it."""
    made: Any = stage(rows)
    kept, dropped = made if isinstance(made, tuple) else (made, ())
    noted = {"dropped_by": _name(stage), "dropped_for": "dropped"}
    return list(kept), [{**noted, **row} for row in dropped]


def _name(stage: Any) -> str:
    return str(getattr(stage, "__name__", type(stage).__name__))
