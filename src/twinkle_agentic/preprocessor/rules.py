"""What a conversation must be, and must not do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.reward.base import text_of
from twinkle_agentic.preprocessor.base import QualityFilter, Row, calls_of, messages_of, said_by, without_thinking

ROLES = frozenset(("system", "user", "assistant", "tool"))
REFUSALS = (
    r"\bas an ai (?:language )?model\b|\bi(?:'m| am) (?:sorry|afraid),? (?:but )?i (?:can(?:no|')t|am unable)|"
    r"\bi (?:can(?:no|')t|won't|am (?:not able|unable) to) (?:help|assist|fulfil|comply|provide|do that)|"
    r"作为(?:一个)?(?:人工智能|AI|语言模型)|我(?:不能|无法)(?:帮|协助|提供|满足|回答)|抱歉，我(?:不能|无法)"
)
REFUSAL_CHARACTERS = 300
"""A refusal is said at the beginning; later the words may be part of an answer."""
MAX_CHARACTERS = 200_000
EAST_ASIAN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]")
EAST_ASIAN_SHARE = 0.3


class HardFilter(QualityFilter):
    """Keeps conversations in which a user asks and an assistant answers last, in known roles and with something said.

    Args:
        min_user_chars: Of the question, where there is only one.
        min_user_chars_cjk: The same for texts that are Chinese, Japanese or Korean by three characters in ten.
        min_assistant_chars_2turn: Of the answer to an only question, unless it comes with reasoning.
        allow_incomplete_role: Keep those without a user's turn, which are texts to read.
        max_rounds: Questions of a conversation; without it any number.
        agent_max_rounds: The same where tools are called; ``max_rounds`` without it.
        min_characters: Of the last answer.
    """

    def __init__(
        self,
        min_user_chars: int = 0,
        min_user_chars_cjk: int = 0,
        min_assistant_chars_2turn: int = 0,
        allow_incomplete_role: bool = False,
        *,
        max_rounds: int | None = None,
        agent_max_rounds: int | None = None,
        min_characters: int = 1,
    ) -> None:
        super().__init__()
        self._least_asked = (min_user_chars, min_user_chars_cjk)
        self._least_answered = min_assistant_chars_2turn
        self._allows_incomplete = allow_incomplete_role
        self._most_rounds = (max_rounds, max_rounds if agent_max_rounds is None else agent_max_rounds)
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
        if len(answers[-1].strip()) < self._min_characters:
            return "empty answer"
        return self._round_reason(row, answers)

    def _round_reason(self, row: Row, answers: Sequence[str]) -> str | None:
        asked = said_by(row, "user")
        most = self._most_rounds[any(calls_of(message) for message in messages_of(row))]
        if most is not None and len(asked) > most:
            return "too many rounds"
        if len(asked) != 1:
            return None
        question = asked[0].strip()
        is_east_asian = len(EAST_ASIAN.findall(question)) >= EAST_ASIAN_SHARE * max(len(question), 1)
        if len(question) < self._least_asked[is_east_asian]:
            return "short question"
        is_short = len(answers) == 1 and len(answers[0].strip()) < self._least_answered
        return "short answer" if is_short and not _has_reasoning(messages_of(row)[-1]) else None


class MessageSanityFilter(QualityFilter):
    """Cuts what stands after the last answer, and drops conversations whose turns do not fit or hold given words.

    Args:
        sensitive_words: Not to occur, case aside.
        check_role_order: Drop conversations whose turns do not fit.
        check_tool_matching: Drop those in which a tool answers a call that was not made (``tool_call_id``).
        check_content_integrity: Drop those with a message that says nothing and calls nothing, and those outside of
            ``min_turns`` and ``max_msg_chars``.
        trim_to_assistant: Cut what stands after the last answer.
        filter_sensitive: Drop those with sensitive words.
        sensitive_words_file: Further words, one a line; lines that begin with ``#`` are none.
        extra_sensitive_words: Further words.
        min_turns: Messages of users and assistants together.
        max_msg_chars: Of one message; without it any number.

    Raises:
        InvalidInput: The file of words cannot be read.
    """

    def __init__(
        self,
        sensitive_words: Sequence[str] = (),
        *,
        check_role_order: bool = True,
        check_tool_matching: bool = True,
        check_content_integrity: bool = False,
        trim_to_assistant: bool = True,
        filter_sensitive: bool = True,
        sensitive_words_file: str | Path | None = None,
        extra_sensitive_words: Sequence[str] | None = None,
        min_turns: int = 2,
        max_msg_chars: int | None = 50_000,
    ) -> None:
        super().__init__()
        listed = words_of(sensitive_words_file) if sensitive_words_file else []
        words = [*sensitive_words, *listed, *(extra_sensitive_words or ())]
        self._words = [word.strip().lower() for word in words if word.strip()] if filter_sensitive else []
        self._trims = trim_to_assistant
        self._bounds = (min_turns, max_msg_chars)
        checks = {
            _order_reason: check_role_order,
            _matching_reason: check_tool_matching,
            self._content_reason: check_content_integrity,
        }
        self._checks = [check for check, is_wanted in checks.items() if is_wanted]

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        messages = messages_of(row)
        while self._trims and messages and messages[-1].get("role") != "assistant":
            messages.pop()
        return {**row, "messages": messages}

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        if not messages_of(row):
            return "no answer"
        for check in self._checks:
            if (reason := check(row)) is not None:
                return reason
        text = " ".join(text for role in ROLES for text in said_by(row, role)).lower() if self._words else ""
        return "sensitive word" if any(word in text for word in self._words) else None

    def _content_reason(self, row: Row) -> str | None:
        least, most = self._bounds
        messages = messages_of(row)
        texts = [text_of(message.get("content")) for message in messages]
        roles = [message.get("role") for message in messages]
        for message, text in zip(messages, texts, strict=True):
            if not text.strip() and not calls_of(message) and message.get("role") != "tool":
                return "empty message"
        if most is not None and max(map(len, texts), default=0) > most:
            return "long message"
        return "few turns" if roles.count("user") + roles.count("assistant") < least else None


def words_of(path: str | Path) -> list[str]:
    """The words of a file, one a line; lines that begin with ``#`` are none.

    Raises:
        InvalidInput: It cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidInput("sensitive_words_file", f"{path} cannot be read: {error.strerror}") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _order_reason(row: Row) -> str | None:
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
        called = bool(calls_of(message)) or (role == "tool" and called)
        before = role
    return None


def _matching_reason(row: Row) -> str | None:
    """Ids are compared where the calls have any."""
    made: set[str] = set()
    for message in messages_of(row):
        if message.get("role") == "assistant":
            made = {str(call["id"]) for call in calls_of(message) if call.get("id")}
            continue
        answered = message.get("tool_call_id") if message.get("role") == "tool" else None
        if made and answered and str(answered) not in made:
            return "tool's answer to another call"
    return None


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return any(str(message.get(name) or "").strip() for name in ("reasoning_content", "thinking"))


class RefuseFilter(QualityFilter):
    """Drops conversations whose answers begin with a refusal.

    Args:
        patterns: Further ones, as regular expressions.
        check_window: Characters of an answer, its thinking aside, that are looked at.
    """

    def __init__(self, patterns: Sequence[str] = (), *, check_window: int = REFUSAL_CHARACTERS) -> None:
        super().__init__()
        self._window = check_window
        self._pattern = re.compile("|".join((REFUSALS, *patterns)), re.IGNORECASE)

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        answers = (without_thinking(text[:MAX_CHARACTERS])[0].lstrip() for text in said_by(row, "assistant"))
        beginnings = (text[: self._window].replace("’", "'") for text in answers)
        return "refusal" if any(self._pattern.search(text) for text in beginnings) else None


class TokenNumFilter(QualityFilter):
    """Keeps conversations of so many tokens.

    Args:
        hf_tokenizer: The model whose tokenizer counts, or what counts the tokens of a text:
            ``lambda text: len(tokenizer.encode(text))``; words if omitted.
        min_num: At least.
        max_num: At most.
        role: Whose messages count; all if omitted.
        count: The same as a function for ``hf_tokenizer``.
    """

    def __init__(
        self,
        hf_tokenizer: str | Callable[[str], int] | None = None,
        min_num: int = 10,
        max_num: int = 8192,
        role: str | None = None,
        *,
        count: Callable[[str], int] | None = None,
    ) -> None:
        super().__init__()
        self._count = count or (_counter(hf_tokenizer) if isinstance(hf_tokenizer, str) else hf_tokenizer) or _words
        self._range = range(min_num, max_num + 1)
        self._roles = ROLES if role is None else (role,)

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        number = sum(self._count(text) for role in self._roles for text in said_by(row, role))
        if number in self._range:
            return None
        return "too short" if number < self._range.start else "too long"


def _counter(model_id: str) -> Callable[[str], int]:
    # Brings transformers, which rules do without.
    from twinkle.template import Template  # noqa: PLC0415

    tokenizer = Template(model_id).tokenizer
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _words(text: str) -> int:
    return len(text.split())


def whole_text(row: Any) -> str:
    """All that is said in a row."""
    return "\n".join(text for role in sorted(ROLES) for text in said_by(row, role))
