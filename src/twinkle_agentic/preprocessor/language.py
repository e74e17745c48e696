"""Rows by the language that is spoken in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row, said_by

INSTALL = "pip install 'twinkle-queue[refine]'"
MAX_CHARACTERS = 20_000


class LanguageFilter(QualityFilter):
    """Keeps rows whose texts are surely of a language, or of one of several, as ``py3langid`` tells.

    Notes the language in ``language``. A row without letters of the role has none, and stays.

    Args:
        lang: Its code (ISO 639-1: ``en``, ``zh``) or several; any language if empty.
        min_score: The least probability of the likeliest language, 0 to 1. Of a few words it is often low.
        role: Whose messages are read, those of a row together.
        allowed: The same as ``lang``.

    Raises:
        ConfigError: ``py3langid`` is not installed; names the extra.
        InvalidInput: A language is not known, or ``min_score`` out of its range.
    """

    adds = ("language",)

    def __init__(
        self,
        lang: str | Sequence[str] = "",
        min_score: float = 0.7,
        role: str = "assistant",
        *,
        allowed: str | Sequence[str] = (),
    ) -> None:
        super().__init__()
        lang = lang or allowed
        if not 0 <= min_score <= 1:
            raise InvalidInput("min_score", f"is {min_score}; send 0 to 1")
        try:
            # An extra: few filters need it.
            from py3langid.langid import MODEL_FILE, LanguageIdentifier  # noqa: PLC0415
        except ModuleNotFoundError:
            raise ConfigError(f"languages are told apart by the package py3langid: {INSTALL}") from None
        self._identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._languages = frozenset((lang,) if isinstance(lang, str) and lang else lang)
        known = frozenset(map(str, self._identifier.nb_classes))
        if unknown := sorted(self._languages - known):
            raise InvalidInput("lang", f"{unknown[0]!r} is not known; send some of {', '.join(sorted(known))}")
        self._min_score = min_score
        self._role = role

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        return {**row, "language": self._identified(row)[0]}

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        language, score = self._identified(row)
        if language is None:
            return None
        if self._languages and language not in self._languages:
            return f"in {language}"
        return None if score >= self._min_score else "language not sure"

    def _identified(self, row: Row) -> tuple[str | None, float]:
        text = "\n".join(said_by(row, self._role))[:MAX_CHARACTERS]
        if not any(map(str.isalpha, text)):
            return None, 0.0
        language, score = self._identifier.classify(text)
        return str(language), float(score)
