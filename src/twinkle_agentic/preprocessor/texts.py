"""What texts must be made of, and what is mended in them."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from twinkle.core.errors import InvalidInput
from twinkle_agentic.preprocessor.agent_traces import ToolCallNormalizer
from twinkle_agentic.preprocessor.base import QualityFilter, Row, messages_of, said_by, with_texts

SENTENCE_END = re.compile(r"(?<=[.!?。！？\n])")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u200b\u2060]")
UNDECODED = re.compile("\ufffd")
UNPRINTED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")
SPECIAL_TOKEN = re.compile(r"<\|[^|>\n]{1,40}\|>|</?s>|</?(?:unk|pad)>|\[(?:PAD|UNK|SEP|CLS|MASK)\]|<0x[0-9A-Fa-f]{2}>")
SIGNS = re.compile(r"[\W_]+")
MAX_CHARACTERS = 200_000
Normalization = Literal["NFC", "NFD", "NFKC", "NFKD"]
WRITTEN_BESIDE_OTHERS = frozenset(("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "FULLWIDTH"))
MIN_CHARACTERS = 40
"""Of a text whose letters say something about it."""


class MessageNormalizer(QualityFilter):
    """Spells roles as they are known (``human`` is ``user``, ``gpt`` is ``assistant``) and strips outer spaces.

    Args:
        normalize_tool_calls: Also bring calls that stand in a text into ``tool_calls`` (:class:`ToolCallNormalizer`).
    """

    ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}  # noqa: RUF012

    def __init__(self, normalize_tool_calls: bool = False) -> None:
        super().__init__()
        self._calls = ToolCallNormalizer() if normalize_tool_calls else None

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        stripped = with_texts(row, str.strip)
        messages = []
        for message in messages_of(stripped):
            role = str(message.get("role", "")).strip().lower()
            messages.append({**message, "role": self.ROLES.get(role, role)})
        spelled = {**stripped, "messages": messages}
        return spelled if self._calls is None else self._calls.mend(spelled)


class FixUnicodeFilter(QualityFilter):
    """Composes characters, and removes control characters and marks that nobody sees.

    Args:
        normalization: Unicode's form: NFC, NFD, NFKC or NFKD.
        role: Whose messages are mended; all if omitted.
    """

    def __init__(self, normalization: Normalization = "NFC", role: str | None = None) -> None:
        super().__init__()
        if normalization not in get_args(Normalization):
            raise InvalidInput(
                "normalization", f"is {normalization!r}; send one of {', '.join(get_args(Normalization))}"
            )
        self._form: Normalization = normalization
        self._role = role

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        return with_texts(row, lambda text: CONTROL.sub("", unicodedata.normalize(self._form, text)), self._role)


class RemoveRepeatSentencesFilter(QualityFilter):
    """Says in a text each longer sentence once.

    Args:
        lowercase: Whether sentences that differ in case are the same.
        ignore_special_character: Whether those are that differ in spaces and signs.
        role: Whose messages are mended; all if omitted.
        min_characters: Of a sentence that counts.
    """

    def __init__(
        self,
        lowercase: bool = False,
        ignore_special_character: bool = False,
        role: str | None = None,
        *,
        min_characters: int = 20,
    ) -> None:
        super().__init__()
        self._lowers = lowercase
        self._ignores_signs = ignore_special_character
        self._role = role
        self._min_characters = min_characters

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        return with_texts(row, self._once, self._role)

    def _once(self, text: str) -> str:
        seen: set[str] = set()
        kept = []
        for sentence in SENTENCE_END.split(text):
            key = sentence.strip().lower() if self._lowers else sentence.strip()
            key = SIGNS.sub("", key) if self._ignores_signs else key
            if len(key) < self._min_characters or key not in seen:
                kept.append(sentence)
            seen.add(key)
        return "".join(kept)


class SpecialCharsFilter(QualityFilter):
    """Drops conversations whose answers are signs for the most part.

    Args:
        max_ratio: The share of characters that are neither letters, digits nor spaces.
        role: Whose messages are looked at.
    """

    def __init__(self, max_ratio: float = 0.5, role: str = "assistant") -> None:
        super().__init__()
        self._max_ratio = max_ratio
        self._role = role

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        for text in said_by(row, self._role):
            beginning = text[:MAX_CHARACTERS]
            signs = sum(not (character.isalnum() or character.isspace()) for character in beginning)
            if len(beginning) >= MIN_CHARACTERS and signs > self._max_ratio * len(beginning):
                return "signs for the most part"
        return None


class TokenSoupFilter(QualityFilter):
    """Drops conversations with answers that are no language: few different words, or scripts that change in words.

    Args:
        replacement_char_ratio: The most of a text that stands for what could not be decoded (U+FFFD); 0 to 1.
        control_char_ratio: The most that are control characters.
        private_use_ratio: The most that are characters for private use.
        special_token_count: So many tokens of models (``<|im_end|>``, ``[PAD]``, ``</s>``) are too many.
        script_chaos_threshold: The most of the letters after which another script begins.
        script_chaos_min_chars: Letters of a text that this is asked of.
        max_chars: Characters of a text that are looked at.
        min_variety: The share of different words among the first few hundred.
        max_mixed: The share of words whose letters are of several scripts.
    """

    WORDS = 400
    FEWEST_WORDS = 30

    def __init__(
        self,
        replacement_char_ratio: float = 0.02,
        control_char_ratio: float = 0.01,
        private_use_ratio: float = 0.03,
        special_token_count: int = 20,
        script_chaos_threshold: float = 0.55,
        script_chaos_min_chars: int = 40,
        *,
        max_chars: int = MAX_CHARACTERS,
        min_variety: float = 0.1,
        max_mixed: float = 0.2,
    ) -> None:
        super().__init__()
        self._most_of = (
            (UNDECODED, replacement_char_ratio, "could not be decoded"),
            (UNPRINTED, control_char_ratio, "control characters"),
            (PRIVATE, private_use_ratio, "characters for private use"),
        )
        self._special_tokens = special_token_count
        self._chaos = (script_chaos_threshold, script_chaos_min_chars)
        self._max_chars = max_chars
        self._min_variety = min_variety
        self._max_mixed = max_mixed

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        for whole in said_by(row, "assistant"):
            text = whole[: self._max_chars]
            if (reason := self._character_reason(text)) is not None:
                return reason
            words = text.split()[: self.WORDS]
            if len(words) < self.FEWEST_WORDS:
                continue
            if len(set(words)) < self._min_variety * len(words):
                return "few different words"
            if sum(_is_mixed(word) for word in words) > self._max_mixed * len(words):
                return "scripts change within words"
        return None

    def _character_reason(self, text: str) -> str | None:
        for pattern, most, reason in self._most_of:
            if len(pattern.findall(text)) > most * len(text):
                return reason
        if len(SPECIAL_TOKEN.findall(text)) >= self._special_tokens:
            return "tokens of a model"
        most, fewest = self._chaos
        if text.isascii():
            return None
        scripts = [_script(character) for character in text if character.isalpha()]
        changes = sum(one != other for one, other in pairwise(scripts))
        return (
            "scripts change again and again"
            if len(scripts) >= max(fewest, 2) and changes > most * (len(scripts) - 1)
            else None
        )


@lru_cache(maxsize=8192)
def _script(character: str) -> str:
    """The script of a letter; those of East Asia are one, since good texts mix them."""
    name = unicodedata.name(character, "?").split()[0]
    return "East Asia" if name in WRITTEN_BESIDE_OTHERS else name


def _is_mixed(word: str) -> bool:
    """Whether its letters are of several scripts; those of East Asia stand beside others in good texts."""
    names = (unicodedata.name(character, "?").split()[0] for character in word[:50] if character.isalpha())
    return len({name for name in names if name not in WRITTEN_BESIDE_OTHERS}) > 1
