"""What texts must be made of, and what is mended in them."""

from __future__ import annotations

import re
import unicodedata

from twinkle_agentic.preprocessor.base import QualityFilter, Row, messages_of, said_by, with_texts

SENTENCE_END = re.compile(r"(?<=[.!?。！？\n])")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u200b\u2060]")
MAX_CHARACTERS = 200_000
WRITTEN_BESIDE_OTHERS = frozenset(("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "FULLWIDTH"))
MIN_CHARACTERS = 40
"""Of a text whose letters say something about it."""


class MessageNormalizer(QualityFilter):
    """Spells roles as they are known (``human`` is ``user``, ``gpt`` is ``assistant``) and strips outer spaces."""

    ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}  # noqa: RUF012

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        stripped = with_texts(row, str.strip)
        messages = []
        for message in messages_of(stripped):
            role = str(message.get("role", "")).strip().lower()
            messages.append({**message, "role": self.ROLES.get(role, role)})
        return {**stripped, "messages": messages}


class FixUnicodeFilter(QualityFilter):
    """Composes characters (NFC), and removes control characters and marks that nobody sees."""

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        return with_texts(row, lambda text: CONTROL.sub("", unicodedata.normalize("NFC", text)))


class RemoveRepeatSentencesFilter(QualityFilter):
    """Says in a text each longer sentence once.

    Args:
        min_characters: Of a sentence that counts.
    """

    def __init__(self, *, min_characters: int = 20) -> None:
        super().__init__()
        self._min_characters = min_characters

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        return with_texts(row, self._once)

    def _once(self, text: str) -> str:
        seen: set[str] = set()
        kept = []
        for sentence in SENTENCE_END.split(text):
            key = sentence.strip()
            if len(key) < self._min_characters or key not in seen:
                kept.append(sentence)
            seen.add(key)
        return "".join(kept)


class SpecialCharsFilter(QualityFilter):
    """Drops conversations whose answers are signs for the most part.

    Args:
        max_ratio: The share of characters that are neither letters, digits nor spaces.
    """

    def __init__(self, *, max_ratio: float = 0.5) -> None:
        super().__init__()
        self._max_ratio = max_ratio

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        for text in said_by(row, "assistant"):
            beginning = text[:MAX_CHARACTERS]
            signs = sum(not (character.isalnum() or character.isspace()) for character in beginning)
            if len(beginning) >= MIN_CHARACTERS and signs > self._max_ratio * len(beginning):
                return "signs for the most part"
        return None


class TokenSoupFilter(QualityFilter):
    """Drops conversations with answers that are no language: few different words, or scripts that change in words.

    Args:
        min_variety: The share of different words among the first few hundred.
        max_mixed: The share of words whose letters are of several scripts.
    """

    WORDS = 400
    FEWEST_WORDS = 30

    def __init__(self, *, min_variety: float = 0.1, max_mixed: float = 0.2) -> None:
        super().__init__()
        self._min_variety = min_variety
        self._max_mixed = max_mixed

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        for text in said_by(row, "assistant"):
            words = text[:MAX_CHARACTERS].split()[: self.WORDS]
            if len(words) < self.FEWEST_WORDS:
                continue
            if len(set(words)) < self._min_variety * len(words):
                return "few different words"
            if sum(_is_mixed(word) for word in words) > self._max_mixed * len(words):
                return "scripts change within words"
        return None


def _is_mixed(word: str) -> bool:
    """Whether its letters are of several scripts; those of East Asia stand beside others in good texts."""
    names = (unicodedata.name(character, "?").split()[0] for character in word[:50] if character.isalpha())
    return len({name for name in names if name not in WRITTEN_BESIDE_OTHERS}) > 1
