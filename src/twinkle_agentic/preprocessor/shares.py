"""Texts of which too much, or too little, is of a kind: repetitions, letters, words that are not wanted."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from twinkle.core.errors import InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row, said_by

WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
MAX_CHARACTERS = 200_000
"""Of a text that are looked at."""


class ShareFilter(QualityFilter):
    """Drops rows in which a text of one role has a share out of bounds. One of one's own brings ``share`` and ``why``.

    Args:
        role: Whose messages are looked at, each for itself.
        least: Of the share, 0 to 1.
        most: Of the share, 0 to 1.
        field: How errors name the bound.
    """

    why = "share out of bounds"

    def __init__(self, role: str, *, least: float = 0.0, most: float = 1.0, field: str) -> None:
        super().__init__()
        if not (0 <= least <= 1 and 0 <= most <= 1):
            raise InvalidInput(field, f"is {most if least == 0 else least}; send a share of 0 to 1")
        self._role = role
        self._least, self._most = least, most

    @abstractmethod
    def share(self, text: str) -> float | None:
        """Of a text, 0 to 1; none of one that is too short to have one."""

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        shares = (self.share(text[:MAX_CHARACTERS]) for text in said_by(row, self._role))
        return (
            self.why if any(share is not None and not self._least <= share <= self._most for share in shares) else None
        )


class RepeatFilter(ShareFilter):
    """Drops rows with a text of which too much are runs that it repeats.

    Args:
        rep_len: How long a run is, in words or in characters.
        max_ratio: Of the share.
        role: Whose messages are looked at.
    """

    def __init__(self, rep_len: int = 10, max_ratio: float = 0.4, role: str = "assistant") -> None:
        super().__init__(role, most=max_ratio, field="max_ratio")
        if rep_len < 1:
            raise InvalidInput("rep_len", f"is {rep_len}; send 1 or more")
        self._length = rep_len


class WordRepeatFilter(RepeatFilter):
    """Drops rows with a text that says the same words again and again.

    The share is that of runs of ``rep_len`` words that occur more than once: the sum of their counts over the sum of
    all counts (word repetition ratio; Laurençon et al., 2022, "The BigScience ROOTS Corpus"). Case does not count.
    """

    why = "words repeated"

    def share(self, text: str) -> float | None:
        """See :class:`ShareFilter`."""
        words = [found.group().lower() for found in WORD.finditer(text)]
        runs = Counter(tuple(words[i : i + self._length]) for i in range(len(words) - self._length + 1))
        return sum(count for count in runs.values() if count > 1) / runs.total() if runs else None


class CharRepeatFilter(RepeatFilter):
    """Drops rows with a text that repeats characters, in languages without spaces too.

    The share is that of the most frequent runs of ``rep_len`` characters: of N different runs the √N most frequent, as
    far as they occur more than once; their counts over the sum of all counts (character repetition ratio; Laurençon et
    al., 2022, "The BigScience ROOTS Corpus").
    """

    why = "characters repeated"

    def share(self, text: str) -> float | None:
        """See :class:`ShareFilter`."""
        runs = Counter(text[i : i + self._length] for i in range(len(text) - self._length + 1))
        if not runs:
            return None
        most_frequent = runs.most_common(math.isqrt(len(runs)))
        return sum(count for _, count in most_frequent if count > 1) / runs.total()


class AlphanumericFilter(ShareFilter):
    """Drops rows with a text of which few characters are letters or digits.

    Args:
        min_ratio: Of letters and digits among all characters.
        role: Whose messages are looked at.
    """

    why = "few letters"

    def __init__(self, min_ratio: float = 0.25, role: str = "assistant") -> None:
        super().__init__(role, least=min_ratio, field="min_ratio")

    def share(self, text: str) -> float | None:
        """See :class:`ShareFilter`."""
        return sum(map(str.isalnum, text)) / len(text) if text else None


class FlaggedWordsFilter(ShareFilter):
    """Drops rows with a text that holds too many words of a list.

    The list is yours: what must not be said is for who trains to say, and none comes with this package.

    Args:
        lang: Of the list, for its file's name where ``words`` is a folder: ``en`` reads ``en.txt``.
        max_ratio: Of such words among all words.
        role: Whose messages are looked at.
        words: The words, case aside; or a file with one a line; or a folder of such files.

    Raises:
        InvalidInput: ``words`` is missing, empty or cannot be read.
    """

    why = "flagged words"

    def __init__(
        self,
        lang: str = "en",
        max_ratio: float = 0.045,
        role: str = "assistant",
        *,
        words: Sequence[str] | str | Path | None = None,
    ) -> None:
        super().__init__(role, most=max_ratio, field="max_ratio")
        if words is None:
            raise InvalidInput("words", "are missing; send a list of words, or a file with one a line")
        given = _read_words(Path(words), lang) if isinstance(words, (str, Path)) else words
        self._words = frozenset(word.strip().lower() for word in given if word.strip())
        if not self._words:
            raise InvalidInput("words", "are none; send a list of words, or a file with one a line")

    def share(self, text: str) -> float | None:
        """See :class:`ShareFilter`."""
        said = [found.group().lower() for found in WORD.finditer(text)]
        return sum(word in self._words for word in said) / len(said) if said else None


def _read_words(path: Path, lang: str) -> list[str]:
    file = path / f"{lang}.txt" if path.is_dir() else path
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("words", f"{file} cannot be read as text: {type(error).__name__}") from error
