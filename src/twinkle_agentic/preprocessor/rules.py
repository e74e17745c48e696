"""What a conversation must be, and must not do."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row, messages_of, said_by

ROLES = frozenset(("system", "user", "assistant", "tool"))
REFUSALS = (
    r"\bas an ai (?:language )?model\b|\bi(?:'m| am) (?:sorry|afraid),? (?:but )?i (?:can(?:no|')t|am unable)|"
    r"\bi (?:can(?:no|')t|won't|am (?:not able|unable) to) (?:help|assist|fulfil|comply|provide|do that)|"
    r"作为(?:一个)?(?:人工智能|AI|语言模型)|我(?:不能|无法)(?:帮|协助|提供|满足|回答)|抱歉，我(?:不能|无法)"
)
REFUSAL_CHARACTERS = 300
"""A refusal is said at the beginning; later the words may be part of an answer."""
MAX_CHARACTERS = 200_000


class HardFilter(QualityFilter):
    """Keeps conversations in which a user asks and an assistant answers last, in known roles and with something said.

    Args:
        allow_incomplete_role: Keep those without a user's turn, which are texts to read.
        min_characters: Of the last answer.
    """

    def __init__(self, *, allow_incomplete_role: bool = False, min_characters: int = 1) -> None:
        super().__init__()
        self._allows_incomplete = allow_incomplete_role
        self._min_characters = min_characters

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        roles = [message.get("role") for message in messages_of(row)]
        answers = said_by(row, "assistant")
        if not roles or not set(roles) <= ROLES:
            return "no messages" if not roles else "unknown role"
        if not self._allows_incomplete and "user" not in roles:
            return "nobody asks"
        if not answers or roles[-1] != "assistant":
            return "no answer at the end"
        return None if len(answers[-1].strip()) >= self._min_characters else "empty answer"


class MessageSanityFilter(QualityFilter):
    """Cuts what stands after the last answer, and drops conversations whose turns do not fit or hold given words.

    Args:
        sensitive_words: Not to occur, case aside.
    """

    def __init__(self, sensitive_words: Sequence[str] = ()) -> None:
        super().__init__()
        self._words = [word.lower() for word in sensitive_words if word]

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        messages = messages_of(row)
        while messages and messages[-1].get("role") != "assistant":
            messages.pop()
        return {**row, "messages": messages}

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        before = None
        called = False
        for number, message in enumerate(messages_of(row)):
            role = message.get("role")
            if role == "system" and number:
                return "system message in the middle"
            if role == "tool" and not called:
                return "tool's answer without a call"
            if role == before == "user" or (role == before == "assistant" and not called):
                return f"two turns of the {role} in a row"
            called = bool(message.get("tool_calls")) or (role == "tool" and called)
            before = role
        if before is None:
            return "no answer"
        text = " ".join(text for role in ROLES for text in said_by(row, role)).lower()
        return "sensitive word" if any(word in text for word in self._words) else None


class RefuseFilter(QualityFilter):
    """Drops conversations whose answers begin with a refusal.

    Args:
        patterns: Further ones, as regular expressions.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        super().__init__()
        self._pattern = re.compile("|".join((REFUSALS, *patterns)), re.IGNORECASE)

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        beginnings = (text[:REFUSAL_CHARACTERS].replace("’", "'") for text in said_by(row, "assistant"))
        return "refusal" if any(self._pattern.search(text) for text in beginnings) else None


class DeadLoopFilter(QualityFilter):
    """Drops conversations that go in circles: one call made again and again, or one line said again and again.

    Args:
        max_repeats: How often the same may come.
        min_characters: Of a line that counts.
    """

    def __init__(self, *, max_repeats: int = 4, min_characters: int = 12) -> None:
        super().__init__()
        if max_repeats < 1:
            raise InvalidInput("max_repeats", f"is {max_repeats}; send 1 or more")
        self._max_repeats = max_repeats
        self._min_characters = min_characters

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        calls = Counter(
            json.dumps(call.get("function"), sort_keys=True, default=str)
            for message in messages_of(row)
            for call in message.get("tool_calls") or ()
        )
        if max(calls.values(), default=0) > self._max_repeats:
            return "one call again and again"
        for text in said_by(row, "assistant"):
            lines = Counter(line.strip() for line in text[:MAX_CHARACTERS].splitlines())
            if any(count > self._max_repeats for line, count in lines.items() if len(line) >= self._min_characters):
                return "one line again and again"
        return None


class DedupFilter(QualityFilter):
    """Keeps the first of conversations that are alike, spaces, case and punctuation aside, of all that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[bytes] = set()

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        words = [(role, re.findall(r"\w+", text.lower())) for role in sorted(ROLES) for text in said_by(row, role)]
        digest = hashlib.sha256(json.dumps(words).encode()).digest()
        if digest in self._seen:
            return "seen before"
        self._seen.add(digest)
        return None


class TokenNumFilter(QualityFilter):
    """Keeps conversations of so many tokens.

    Args:
        count: Counts the tokens of a text: ``lambda text: len(tokenizer.encode(text))``; words if omitted.
        min_num: At least.
        max_num: At most.
    """

    def __init__(self, count: Callable[[str], int] | None = None, *, min_num: int = 10, max_num: int = 8192) -> None:
        super().__init__()
        self._count = count or _words
        self._range = range(min_num, max_num + 1)

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        number = sum(self._count(text) for role in ROLES for text in said_by(row, role))
        if number in self._range:
            return None
        return "too short" if number < self._range.start else "too long"


def _words(text: str) -> int:
    return len(text.split())


def whole_text(row: Any) -> str:
    """All that is said in a row."""
    return "\n".join(text for role in sorted(ROLES) for text in said_by(row, role))
