"""Rows that say nearly what an earlier one says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row, said_by

INSTALL = "pip install 'twinkle-queue[refine]'"
WORD = re.compile(r"\w+")
SPACES = re.compile(r"\s+")
MAX_CHARACTERS = 200_000
FALSE_HITS_AND_MISSES = (0.1, 0.9)
"""What a bucket is tuned for: what it finds is compared anyway, what it misses is lost."""
MOST_TO_LOOK_FOR = 0.9
"""Buckets for a higher similarity than this would be too few."""

Tokenization = Literal["character", "space"]


class MinHashDedupFilter(QualityFilter):
    """Keeps the first of rows whose texts share most of their shingles, of all that it sees.

    Two texts are near where the Jaccard similarity of their sets of shingles, estimated by MinHash (Broder, 1997, "On
    the Resemblance and Containment of Documents"; its standard error is √(J(1-J)/num_permutations)), reaches
    ``jaccard_threshold``. Which texts are compared at all is chosen by locality-sensitive hashing (``datasketch``): a
    row costs the same however many came before, and a pair close to the threshold may be missed. Case and runs of
    spaces do not count. The same rows give the same result in every run.

    Args:
        tokenization: Shingles of ``character``s, also for languages without spaces, or of words (``space``).
        window_size: Characters or words of a shingle.
        num_permutations: Hashes of a text.
        jaccard_threshold: 0 to 1.
        role: Whose messages are compared, those of a row together; a row without text of it stays.

    Raises:
        ConfigError: ``datasketch`` is not installed; names the extra.
        InvalidInput: A setting is out of its range; names it.
    """

    def __init__(
        self,
        tokenization: Tokenization = "character",
        window_size: int = 5,
        num_permutations: int = 256,
        jaccard_threshold: float = 0.7,
        role: str = "assistant",
    ) -> None:
        super().__init__()
        if tokenization not in ("character", "space"):
            raise InvalidInput("tokenization", f"is {tokenization!r}; send 'character' or 'space'")
        if window_size < 1:
            raise InvalidInput("window_size", f"is {window_size}; send 1 or more")
        if num_permutations < 16:
            raise InvalidInput("num_permutations", f"is {num_permutations}; send 16 or more")
        if not 0 < jaccard_threshold <= 1:
            raise InvalidInput("jaccard_threshold", f"is {jaccard_threshold}; send more than 0 and at most 1")
        try:
            # An extra: few filters need it.
            import datasketch  # noqa: PLC0415
        except ModuleNotFoundError:
            raise ConfigError(f"near duplicates are found by the package datasketch: {INSTALL}") from None
        self._by_character = tokenization == "character"
        self._window = window_size
        self._permutations = num_permutations
        self._threshold = jaccard_threshold
        self._role = role
        self._hash: Any = datasketch.MinHash
        self._buckets: Any = datasketch.MinHashLSH(
            threshold=min(jaccard_threshold, MOST_TO_LOOK_FOR), num_perm=num_permutations, weights=FALSE_HITS_AND_MISSES
        )
        self._seen: list[Any] = []

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        text = SPACES.sub(" ", "\n".join(said_by(row, self._role))[:MAX_CHARACTERS].lower()).strip()
        if not text:
            return None
        hashed = self._hash(num_perm=self._permutations)
        hashed.update_batch({shingle.encode("utf-8", "surrogatepass") for shingle in self._shingles(text)})
        near = (self._seen[number] for number in self._buckets.query(hashed))
        if any(hashed.jaccard(other) >= self._threshold for other in near):
            return "nearly seen before"
        self._buckets.insert(len(self._seen), hashed)
        self._seen.append(hashed)
        return None

    def _shingles(self, text: str) -> Iterator[str]:
        parts = text if self._by_character else WORD.findall(text)
        between = "" if self._by_character else " "
        for start in range(max(1, len(parts) - self._window + 1)):
            yield between.join(parts[start : start + self._window])
