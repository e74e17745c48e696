"""Passages said briefly by rules: their first sentence, those sentences that tell most, and their keywords."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle_agentic.condenser.base import Condenser
from twinkle_agentic.data_format.chunks import Chunk, Chunks

SENTENCE = re.compile(r"[^.!?。！？\n]*(?:[.!?](?!\s|$)[^.!?。！？\n]*)*[.!?。！？]?")
WORD = re.compile(r"[^\W_]+(?:[-'’.][^\W_]+)*")
EAST_ASIAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
WORDS_OF_NO_TOPIC = """
a about above after again all also am an and any are as at be because been before being below between both but
by can could did do does doing down during each few for from further had has have having he her here hers him
his how i if in into is it its itself just me more most my no nor not now of off on once only or other our ours
out over own same she should so some such than that the their theirs them then there these they this those
through to too under until up very was we were what when where which while who whom why will with would you your
yours
"""
STOP = frozenset(WORDS_OF_NO_TOPIC.split())
EAST_ASIAN_STOP = re.compile("[的了是在和与或及也都就而着被把对从到这那有为以于等个之其并不很]")
MOST_WORDS = 3
"""Of a keyword."""
EAST_ASIAN_KEYWORD = 6
"""Characters of a keyword without spaces; a longer run is a clause."""

_log = event_log()


class KeywordCondenser(Condenser):
    """Each passage long enough becomes its first sentence, the sentences that tell most, and its keywords.

    Keywords are those of RAKE (Rose, Engel, Cramer and Cowley, 2010, "Automatic Keyword Extraction from Individual
    Documents", in Text Mining: Applications and Theory): runs of words without stop words and signs, each scored by the
    sum over its words of degree / frequency, where the degree counts the words of all runs that a word is in. A
    sentence tells as much as its words score in the mean. No model is needed; what does not come out shorter stays.

    Args:
        num_relations: Sentences besides the first.
        max_first_sentence_chars: The first sentence is cut to.
        num_keywords: At most.
        compression_ratio: How much shorter, above 1; the first sentence is kept in any case.
        spacy_model: Has no effect but a line in the log: sentences are chosen by their words, not parsed.
        min_chars: Of a passage that is shortened.
        skip_roles: Whose messages stay as they are.
        rounds: The numbers of the messages to shorten; all if omitted.

    Raises:
        InvalidInput: A number is out of its range; names it.
    """

    def __init__(
        self,
        num_relations: int = 3,
        max_first_sentence_chars: int = 160,
        num_keywords: int = 8,
        compression_ratio: float = 4.0,
        spacy_model: str | None = None,
        min_chars: int = 200,
        skip_roles: Sequence[str] = ("system", "tool", "assistant"),
        rounds: Sequence[int] | None = None,
    ) -> None:
        if compression_ratio <= 1:
            raise InvalidInput("compression_ratio", f"is {compression_ratio}; send more than 1")
        for field, value, least in (
            ("num_relations", num_relations, 0),
            ("max_first_sentence_chars", max_first_sentence_chars, 1),
            ("num_keywords", num_keywords, 0),
            ("min_chars", min_chars, 0),
        ):
            if value < least:
                raise InvalidInput(field, f"is {value}; send {least} or more")
        if spacy_model is not None:
            _log.info("condenser.no_parser", spacy_model=spacy_model, next="sentences are chosen by their words")
        self._num_sentences = num_relations
        self._first_chars = max_first_sentence_chars
        self._num_keywords = num_keywords
        self._ratio = compression_ratio
        self._min_chars = min_chars
        self._skip_roles = frozenset(skip_roles)
        self._rounds = None if rounds is None else frozenset(rounds)

    def __call__(self, chunks: Chunks, **kwargs: Any) -> Chunks:
        """The conversation with its passages shortened."""
        return chunks.replaced(self._shorter(chunk) if self._is_wanted(chunk) else chunk for chunk in chunks)

    def _is_wanted(self, chunk: Chunk) -> bool:
        return (
            chunk.role not in self._skip_roles
            and (self._rounds is None or chunk.round in self._rounds)
            and len(chunk.content) >= self._min_chars
        )

    def _shorter(self, chunk: Chunk) -> Chunk:
        text = self.condensed(chunk.content)
        return chunk.condensed(text) if 0 < len(text) < len(chunk.content) else chunk

    def condensed(self, text: str) -> str:
        """A passage in fewer words: at most ``len(text) / compression_ratio`` characters besides the first sentence."""
        sentences = [found.group().strip() for found in SENTENCE.finditer(text) if found.group().strip()]
        if not sentences:
            return ""
        first, scores = sentences[0][: self._first_chars], word_scores(text)
        left = len(text) / self._ratio - len(first)
        words: list[str] = []
        for keyword in keywords(text, scores):
            if len(words) == self._num_keywords or len(keyword) + 2 > left:
                break
            words.append(keyword)
            left -= len(keyword) + 2
        chosen: set[int] = set()
        by_score = sorted(range(1, len(sentences)), key=lambda number: -_mean_score(sentences[number], scores))
        for number in by_score:
            if len(chosen) < self._num_sentences and len(sentences[number]) + 1 <= left:
                if sentences[number] in {first, *(sentences[other] for other in chosen)}:
                    continue
                chosen.add(number)
                left -= len(sentences[number]) + 1
        lines = [first, *(sentences[number] for number in sorted(chosen))]
        return "\n".join([*lines, *([f"[{', '.join(words)}]"] if words else [])])


def word_scores(text: str) -> dict[str, float]:
    """RAKE's score of each word, lower case: degree / frequency."""
    frequency: Counter[str] = Counter()
    degree: defaultdict[str, int] = defaultdict(int)
    for phrase in _phrases(text):
        for word in phrase:
            frequency[word] += 1
            degree[word] += len(phrase)
    return {word: degree[word] / count for word, count in frequency.items()}


def keywords(text: str, scores: dict[str, float]) -> list[str]:
    """The different candidates of a text, that of the highest score first; equal ones as they come."""
    candidates = dict.fromkeys(phrase for phrase in _phrases(text) if len(phrase) <= MOST_WORDS)
    ordered = sorted(candidates, key=lambda phrase: -sum(scores[word] for word in phrase))
    return [" ".join(phrase) for phrase in ordered]


def _phrases(text: str) -> Iterator[tuple[str, ...]]:
    """Runs of words, lower case, that no stop word, sign or end of line divides."""
    run: list[str] = []
    end = 0
    for found in WORD.finditer(text):
        word = found.group().lower()
        is_next = text[end : found.start()].strip(" \t") == "" and "\n" not in text[end : found.start()]
        if run and (not is_next or word in STOP or EAST_ASIAN.search(word)):
            yield tuple(run)
            run = []
        if EAST_ASIAN.search(word):
            yield from ((part,) for part in EAST_ASIAN_STOP.split(word) if 2 <= len(part) <= EAST_ASIAN_KEYWORD)
        elif word not in STOP:
            run.append(word)
        end = found.end()
    if run:
        yield tuple(run)


def _mean_score(sentence: str, scores: dict[str, float]) -> float:
    found = [scores[word] for phrase in _phrases(sentence) for word in phrase if word in scores]
    return sum(found) / len(found) if found else 0.0
