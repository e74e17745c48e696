"""How alike two texts are, from 0 to 1, each measure by its published formula.

All take time in proportion to the texts, but the two by longest common subsequences: those take one step of big
integers a character or word, a tenth of a second at the greatest length.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

MAX_CHARACTERS = 20_000
"""Of each text."""

_WORD = re.compile(r"\w+")
_WORD_OR_SIGN = re.compile(r"\w+|[^\w\s]")
_MOST_WORDS = 4
"""In a run that BLEU and GLEU count."""


class TextsTooLong(Exception):
    """A text has more characters than are compared."""


def similarity(metric: str, given: str, reference: str) -> float:
    """How alike two texts are by one of :data:`METRICS`.

    Raises:
        TextsTooLong: One of them has more than ``MAX_CHARACTERS``.
    """
    longest = max(len(given), len(reference))
    if longest > MAX_CHARACTERS:
        raise TextsTooLong(f"a text has {longest} characters, more than the {MAX_CHARACTERS} that are compared")
    return METRICS[metric](given, reference)


def fuzzy_match(given: str, reference: str) -> float:
    """``2 LCS / (|a| + |b|)`` over characters: the normalised Indel similarity, which rapidfuzz calls ``ratio``."""
    return _dice(common_subsequence(given, reference), len(given), len(reference))


def cosine(given: str, reference: str) -> float:
    """The cosine between the counts of words (Salton, Wong and Yang 1975)."""
    ours, theirs = (Counter(_words(text)) for text in (given, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    product = sum(count * theirs[word] for word, count in ours.items())
    return min(1.0, product / math.sqrt(sum(n * n for n in ours.values()) * sum(n * n for n in theirs.values())))


def bleu(given: str, reference: str) -> float:
    """BLEU-4 of a sentence (Papineni et al. 2002); runs of two words and more with one added (Lin and Och 2004)."""
    ours, theirs = (_words_and_signs(text) for text in (given, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    total = 0.0
    for size in range(1, _MOST_WORDS + 1):
        matched, num_ours, _ = _overlap(ours, theirs, size)
        added = size > 1
        if matched + added == 0:
            return 0.0
        total += math.log((matched + added) / (num_ours + added))
    brevity = min(0.0, 1 - len(theirs) / len(ours))
    return math.exp(brevity + total / _MOST_WORDS)


def gleu(given: str, reference: str) -> float:
    """The smaller of precision and recall over all runs of one to four words (Wu et al. 2016, section 4.3)."""
    ours, theirs = (_words_and_signs(text) for text in (given, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    counts = [_overlap(ours, theirs, size) for size in range(1, _MOST_WORDS + 1)]
    matched = sum(count[0] for count in counts)
    return matched / max(sum(count[1] for count in counts), sum(count[2] for count in counts))


def meteor(given: str, reference: str) -> float:
    """METEOR by equal words only (Banerjee and Lavie 2005): no stems, no synonyms; matches are chosen from the left."""
    ours, theirs = _words(given), _words(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    places = _aligned(ours, theirs)
    matches = [(own, place) for own, place in enumerate(places) if place is not None]
    if not matches:
        return 0.0
    chunks = 1 + sum(
        (second[0], second[1]) != (first[0] + 1, first[1] + 1) for first, second in itertools.pairwise(matches)
    )
    precision, recall = len(matches) / len(ours), len(matches) / len(theirs)
    mean = 10 * precision * recall / (recall + 9 * precision)
    return mean * (1 - 0.5 * (chunks / len(matches)) ** 3)


def rouge_runs(size: int, given: str, reference: str) -> float:
    """ROUGE-N as F1 (Lin 2004): the overlap of runs of ``size`` words."""
    matched, num_ours, num_theirs = _overlap(_words(given), _words(reference), size)
    return _dice(matched, num_ours, num_theirs)


def rouge_l(given: str, reference: str) -> float:
    """ROUGE-L as F1 (Lin 2004): the longest common subsequence of words."""
    ours, theirs = _words(given), _words(reference)
    return _dice(common_subsequence(ours, theirs), len(ours), len(theirs))


def common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """The length of the longest common subsequence, a row of the table at a time as bits (Hyyro 2004)."""
    bits: dict[Hashable, int] = {}
    for place, item in enumerate(first):
        bits[item] = bits.get(item, 0) | 1 << place
    everything = (1 << len(first)) - 1
    row = everything
    for item in second:
        matched = row & bits.get(item, 0)
        row = ((row + matched) | (row - matched)) & everything
    return len(first) - row.bit_count()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _words_and_signs(text: str) -> list[str]:
    return _WORD_OR_SIGN.findall(text.casefold())


def _overlap(ours: Sequence[str], theirs: Sequence[str], size: int) -> tuple[int, int, int]:
    """How many runs of ``size`` words both have, and how many each has."""
    own, other = (
        Counter(tuple(words[start : start + size]) for start in range(len(words) - size + 1))
        for words in (ours, theirs)
    )
    return (own & other).total(), own.total(), other.total()


def _aligned(ours: Sequence[str], theirs: Sequence[str]) -> list[int | None]:
    """For each of our words the place of its match: the one that goes on from the last match, else the first free."""
    free: dict[str, dict[int, None]] = {}
    for index, word in enumerate(theirs):
        free.setdefault(word, {})[index] = None
    places: list[int | None] = []
    last = -2
    for word in ours:
        left = free.get(word, {})
        place = last + 1 if last + 1 in left else next(iter(left), None)
        if place is not None:
            del left[place]
            last = place
        places.append(place)
    return places


def _dice(matched: int, num_ours: int, num_theirs: int) -> float:
    return 2 * matched / (num_ours + num_theirs) if num_ours + num_theirs else 1.0


METRICS: Mapping[str, Callable[[str, str], float]] = MappingProxyType(
    {
        "fuzzy_match": fuzzy_match,
        "cosine": cosine,
        "bleu": bleu,
        "gleu": gleu,
        "meteor": meteor,
        "rouge_l": rouge_l,
        **{f"rouge_{size}": partial(rouge_runs, size) for size in range(1, 6)},
    }
)
