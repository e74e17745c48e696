"""Conversations that go in circles, and those that were there before."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from twinkle.core.errors import InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row, calls_of, messages_of, said_by, without_thinking

MAX_CHARACTERS = 200_000
DOUBTS = re.compile(
    r"\b(?:wait|hmm+|uh+m*|actually,? (?:no|wait)|let me (?:rethink|re-think|reconsider|try again|start over)|"
    r"i(?:'| a)m (?:getting confused|going in circles)|i (?:made|was) (?:a mistake|an error|wrong))\b|"
    r"等等|等一下|不对|错了|嗯{2,}|让我(?:重新|再)|搞错",
    re.IGNORECASE,
)
"""What is said by somebody who begins anew."""


class DeadLoopFilter(QualityFilter):
    """Drops conversations that go in circles: one call or line again and again; if asked for, doubts or runs of words.

    What stands in ``<think>`` has bounds of its own; those that are None are not looked at.

    Args:
        hesitation_density_threshold: The most doubts ("wait", "let me rethink") in 1,000 characters.
        cascade_window: Characters within which ``cascade_threshold`` doubts may not come.
        cascade_threshold: See there.
        repetition_threshold: The most of the runs of ``ngram_size`` words, 0 to 1, that have been there before.
        ngram_size: Words of a run.
        ngram_min_words: Texts of fewer words have no runs.
        think_hesitation_density_threshold: Of thinking.
        think_cascade_threshold: Of thinking.
        think_repetition_threshold: Of thinking.
        max_repeats: How often the same call or line may come.
        min_characters: Of a line that counts.
    """

    def __init__(
        self,
        hesitation_density_threshold: float | None = None,
        cascade_window: int = 800,
        cascade_threshold: int | None = None,
        repetition_threshold: float | None = None,
        ngram_size: int = 8,
        ngram_min_words: int = 30,
        think_hesitation_density_threshold: float | None = None,
        think_cascade_threshold: int | None = None,
        think_repetition_threshold: float | None = None,
        *,
        max_repeats: int = 4,
        min_characters: int = 12,
    ) -> None:
        super().__init__()
        if max_repeats < 1:
            raise InvalidInput("max_repeats", f"is {max_repeats}; send 1 or more")
        for name, value in (("ngram_size", ngram_size), ("cascade_window", cascade_window)):
            if value < 1:
                raise InvalidInput(name, f"is {value}; send 1 or more")
        self._said = (hesitation_density_threshold, cascade_threshold, repetition_threshold)
        self._thought = (
            think_hesitation_density_threshold,
            think_cascade_threshold,
            think_repetition_threshold,
        )
        self._window = cascade_window
        self._run = (ngram_size, ngram_min_words)
        self._max_repeats = max_repeats
        self._min_characters = min_characters

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        calls = Counter(
            json.dumps(call.get("function"), sort_keys=True, default=str)
            for message in messages_of(row)
            for call in calls_of(message)
        )
        if max(calls.values(), default=0) > self._max_repeats:
            return "one call again and again"
        for whole in said_by(row, "assistant"):
            text = whole[:MAX_CHARACTERS]
            lines = Counter(line.strip() for line in text.splitlines())
            if any(count > self._max_repeats for line, count in lines.items() if len(line) >= self._min_characters):
                return "one line again and again"
            said, thoughts = without_thinking(text)
            reason = self._circles("\n".join(thoughts), *self._thought) or self._circles(said, *self._said)
            if reason:
                return reason
        return None

    def _circles(self, text: str, density: float | None, cascade: int | None, repetition: float | None) -> str | None:
        if density is cascade is repetition is None:
            return None
        doubts = [found.start() for found in DOUBTS.finditer(text)]
        if density is not None and 1000 * len(doubts) > density * len(text):
            return "doubts again and again"
        if cascade is not None and any(
            last - first <= self._window for first, last in zip(doubts, doubts[max(cascade, 1) - 1 :], strict=False)
        ):
            return "doubts again and again"
        size, fewest = self._run
        words = text.split()
        if repetition is None or len(words) < max(fewest, size):
            return None
        runs = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
        return "the same words again and again" if 1 - len(set(runs)) / len(runs) > repetition else None


class DedupFilter(QualityFilter):
    """Keeps the first of conversations that are alike, spaces, case and punctuation aside, of all that it sees.

    Args:
        max_per_sig: How many that are alike stay.
        prefix_chars: Only so much of the system message and of the first question is compared, and the first answer;
            all that is said if neither this nor ``asst_chars`` is given.
        asst_chars: So much of the first answer.
        state_file: Where it is kept what was seen, for several processes or runs; it is locked meanwhile.
    """

    def __init__(
        self,
        max_per_sig: int = 1,
        prefix_chars: int | None = None,
        asst_chars: int | None = None,
        state_file: str | Path | None = None,
    ) -> None:
        super().__init__()
        if max_per_sig < 1:
            raise InvalidInput("max_per_sig", f"is {max_per_sig}; send 1 or more")
        self._most = max_per_sig
        self._compared = None if prefix_chars is asst_chars is None else (prefix_chars, asst_chars)
        self._state_file = None if state_file is None else Path(state_file)
        self._seen: Counter[str] = Counter()

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """See :class:`QualityFilter`."""
        if self._state_file is None:
            return super().apply(rows)
        with FileLock(f"{self._state_file}.lock"):
            self._seen = Counter(json.loads(self._state_file.read_text()) if self._state_file.exists() else {})
            kept = super().apply(rows)
            written = self._state_file.with_name(f".{self._state_file.name}.new")
            written.write_text(json.dumps(self._seen))
            written.replace(self._state_file)
        return kept

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        texts = [(role, text) for role in ("assistant", "system", "tool", "user") for text in said_by(row, role)]
        if self._compared is not None:
            begin, answer = self._compared
            lengths = {"system": begin, "user": begin, "assistant": answer}
            texts = [(role, said[0][:length]) for role, length in lengths.items() if (said := said_by(row, role))]
        words = [(role, re.findall(r"\w+", text.lower())) for role, text in texts]
        digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()
        self._seen[digest] += 1
        return "seen before" if self._seen[digest] > self._most else None
