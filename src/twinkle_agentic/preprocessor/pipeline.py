"""Quality filters in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

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


class QualityPreprocessor(QualityFilter):
    """Mends, then drops, then names the intent; each stage sees what those before it left. ``report`` says how much.

    Args:
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

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """See :class:`QualityFilter`."""
        left = list(rows)
        for stage in self.stages:
            left = stage.apply(left)
        self.dropped = sum((stage.dropped for stage in self.stages), Counter())
        return left

    def report(self) -> str:
        """How many rows each stage has dropped so far, and why, for people to read."""
        lines = [
            f"{type(stage).__name__}: {count} dropped, {reason}"
            for stage in self.stages
            for reason, count in stage.dropped.most_common()
        ]
        return "\n".join(lines) or "nothing was dropped"
