"""Quality filters in a row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row
from twinkle_agentic.preprocessor.judges import IntentClassifier
from twinkle_agentic.preprocessor.rules import (
    DeadLoopFilter,
    DedupFilter,
    HardFilter,
    MessageSanityFilter,
    RefuseFilter,
    TokenNumFilter,
)
from twinkle_agentic.preprocessor.texts import (
    FixUnicodeFilter,
    MessageNormalizer,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenSoupFilter,
)

Stage = QualityFilter | Callable[[list[Row]], Any]
"""A filter, or whatever makes of a list of rows those that stay, or these and those that are dropped."""


class QualityPreprocessor(QualityFilter):
    """Mends, then drops, then names the intent; each stage sees what those before it left. ``report`` says how much.

    Args:
        pipeline: Stages of one's own, in their order, in place of ours; then the switches below have no effect.
        dropped_log_path: A file that rows which are dropped are added to, one a line as JSON, with ``dropped_by`` and
            ``dropped_for``. None is written without it.
        fix_unicode: See :class:`FixUnicodeFilter`.
        remove_repeat_sentences: See :class:`RemoveRepeatSentencesFilter`.
        message_sanity_filter: See :class:`MessageSanityFilter`.
        extra_sensitive_words: For it.
        hard_filter: See :class:`HardFilter`.
        allow_incomplete_role: For it.
        refuse_filter: See :class:`RefuseFilter`.
        dead_loop_filter: See :class:`DeadLoopFilter`.
        token_soup_filter: See :class:`TokenSoupFilter`.
        special_chars_filter: See :class:`SpecialCharsFilter`; off, since tables are made of signs.
        token_num_filter: See :class:`TokenNumFilter`.
        count_tokens: For it.
        token_num_min: For it.
        token_num_max: For it.
        dedup: See :class:`DedupFilter`.
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
        extra_sensitive_words: Sequence[str] = (),
        hard_filter: bool = True,
        allow_incomplete_role: bool = False,
        refuse_filter: bool = True,
        dead_loop_filter: bool = True,
        token_soup_filter: bool = True,
        special_chars_filter: bool = False,
        token_num_filter: bool = True,
        count_tokens: Callable[[str], int] | None = None,
        token_num_min: int = 10,
        token_num_max: int = 8192,
        dedup: bool = False,
        model_filter: QualityFilter | Sequence[QualityFilter] = (),
    ) -> None:
        super().__init__()
        self._log_path = Path(dropped_log_path) if dropped_log_path else None
        if pipeline is not None:
            self.stages: list[Stage] = [_checked(number, stage) for number, stage in enumerate(pipeline)]
            self._notes_columns()
            return
        stages: list[tuple[bool, Callable[[], QualityFilter]]] = [
            (True, MessageNormalizer),
            (fix_unicode, FixUnicodeFilter),
            # A loop must be seen before its repetitions are mended away.
            (dead_loop_filter, DeadLoopFilter),
            (remove_repeat_sentences, RemoveRepeatSentencesFilter),
            (message_sanity_filter, lambda: MessageSanityFilter(extra_sensitive_words)),
            (hard_filter, lambda: HardFilter(allow_incomplete_role=allow_incomplete_role)),
            (refuse_filter, RefuseFilter),
            (token_soup_filter, TokenSoupFilter),
            (special_chars_filter, SpecialCharsFilter),
            (token_num_filter, lambda: TokenNumFilter(count_tokens, min_num=token_num_min, max_num=token_num_max)),
            (dedup, DedupFilter),
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
