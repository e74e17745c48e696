"""How hard an assistant's turn is for a model: what it knows already teaches nothing, what it never reaches neither."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.conversation import user_data_get
from twinkle.reward.base import text_of
from twinkle_agentic.preprocessor.base import KEY_ROUNDS, QualityFilter, Row, messages_of, with_key_rounds
from twinkle_agentic.preprocessor.llm_backend import backend_of

MIN_ANSWER_TOKENS = 6
"""Of shorter answers, means over tokens say little."""
VERDICT = (
    "Here is a question, the right answer, and an attempt at it. Say whether the attempt is right; answer with yes or"
    " no and nothing else.\n\nQuestion:\n{question}\n\nRight answer:\n{truth}\n\nAttempt:\n{attempt}"
)
PARAPHRASE = (
    "Here is a good answer to what was asked before. Answer it yourself, completely and in your own words; do not copy"
    " the answer.\n\n{answer}"
)


@dataclass(frozen=True)
class Round:
    """An assistant's turn and what came before it."""

    context: tuple[Mapping[str, Any], ...]
    answer: str
    number: int
    """Of the message."""
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """What a scorer says of a round; no value: it could not tell, and the round stays."""

    value: float | None
    passed: bool = True
    details: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name, for ``scores``."""


class Scorer(ABC):
    """Judges rounds, many in one call. One of one's own brings ``score`` and a ``name``."""

    name = "score"
    source: Any = None
    """The sampler or :class:`LLMBackend` whose logprobs are read; the filter's if it has none of its own."""

    @abstractmethod
    def score(self, rounds: Sequence[Round]) -> list[Score]:
        """A score for each round."""


class IFDScorer(Scorer):
    """Instruction-following difficulty: the perplexity of the answer after its question over that without it (Li et
    al., 2024, "Superfiltering", after "From Quantity to Quality" by the same, which divides the losses). Near 0 the
    question gives the answer away, above 1 it misleads.

    Args:
        sampler: Whose prompt logprobs are read, or an :class:`LLMBackend`; the filter's if omitted.
        minimum: Rounds below it do not pass.
        maximum: Nor do those above it.
    """

    name = "ifd"

    def __init__(self, sampler: Any = None, minimum: float = 0.0, maximum: float = 1.0) -> None:
        if not 0 <= minimum < maximum:
            raise InvalidInput("minimum", f"is {minimum}, maximum {maximum}; send 0 or more, and a larger maximum")
        self.source = sampler
        self._bounds = (minimum, maximum)

    def score(self, rounds: Sequence[Round]) -> list[Score]:
        """See :class:`Scorer`."""
        low, high = self._bounds
        ratios = [math.exp(-fmean(gains)) for gains in answer_gains(self.source, rounds)]
        return [Score(ratio, low <= ratio <= high) for ratio in ratios]


def answer_logprobs(source: Any, prompts: Sequence[tuple[int, ...]], rounds: Sequence[Round]) -> list[list[float]]:
    """The logprobs of each answer's tokens at the end of a prompt but the first's, which nothing precedes alone.

    Raises:
        InvalidInput: There is neither a sampler nor a backend.
    """
    if source is None:
        raise InvalidInput("backend", "is missing; send one to the filter, or a sampler to the scorer")
    scored = backend_of(source).prompt_logprobs_ids(prompts)
    return [
        [float(value) for value in values[-len(one.answer_ids) + 1 :] if value is not None]
        for values, one in zip(scored, rounds, strict=True)
    ]


def answer_gains(source: Any, rounds: Sequence[Round]) -> list[list[float]]:
    """Of each answer's tokens but the first by how much the question makes them likelier, in nats."""
    whole = answer_logprobs(source, [(*one.prompt_ids, *one.answer_ids) for one in rounds], rounds)
    alone = answer_logprobs(source, [one.answer_ids for one in rounds], rounds)
    return [
        [after - without for after, without in zip(*of_one, strict=True)] for of_one in zip(whole, alone, strict=True)
    ]


class ChrMinScorer(Scorer):
    """The share of an answer's distinct tokens that the question makes likelier wherever they stand: low is hard.

    Of a token that occurs several times the least gain counts, ``min(log p(token | question, before) - log p(token |
    before))``; the token counts as told where that is above 0. The first token, which nothing precedes without the
    question, is left out.

    Args:
        sampler: Whose prompt logprobs are read, or an :class:`LLMBackend`; the filter's if omitted.
        threshold: Rounds from it on do not pass; None lets all pass, for their scores alone.
        exclude_prompt_echoed_ids: Leave out tokens that the question holds too.
    """

    name = "chr_min"

    def __init__(
        self, sampler: Any = None, threshold: float | None = 0.5, exclude_prompt_echoed_ids: bool = False
    ) -> None:
        _check_threshold("threshold", threshold)
        self.source = sampler
        self._threshold = threshold
        self._excludes = exclude_prompt_echoed_ids

    def score(self, rounds: Sequence[Round]) -> list[Score]:
        """See :class:`Scorer`."""
        return [self._score(*of_one) for of_one in zip(rounds, answer_gains(self.source, rounds), strict=True)]

    def _score(self, one: Round, gains: Sequence[float]) -> Score:
        echoed = frozenset(one.prompt_ids) if self._excludes else frozenset()
        least: dict[int, float] = {}
        for token, gain in zip(one.answer_ids[1:], gains, strict=True):
            if token not in echoed:
                least[token] = min(least.get(token, math.inf), gain)
        if not least:
            return Score(None)
        share = sum(gain > 0 for gain in least.values()) / len(least)
        return Score(share, self._threshold is None or share < self._threshold)


class ParaphraseScorer(Scorer):
    """:class:`ChrMinScorer` of what the model itself makes of the answer: it is shown it, and says it in its own words.

    Args:
        sampler: Says it and is scored.
        template: Of the same model.
        chr_min_threshold: Rounds from it on do not pass; None lets all pass, for their scores alone.
        sampling_params: Of the paraphrase.
        max_answer_tokens: That the model is shown of an answer.
    """

    name = "paraphrase"

    def __init__(
        self,
        sampler: Any,
        template: Any,
        chr_min_threshold: float | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        max_answer_tokens: int = 2048,
    ) -> None:
        _check_threshold("chr_min_threshold", chr_min_threshold)
        if max_answer_tokens < 1:
            raise InvalidInput("max_answer_tokens", f"is {max_answer_tokens}; send 1 or more")
        self._sampler = sampler
        self._template = template
        self._inner = ChrMinScorer(sampler, chr_min_threshold)
        self._params = {"max_tokens": 512, "temperature": 0.7, **(sampling_params or {}), "num_samples": 1}
        self._max_answer_tokens = max_answer_tokens

    def score(self, rounds: Sequence[Round]) -> list[Score]:
        """See :class:`Scorer`; a round of whose answer little is left has no score."""
        prompts = [{"messages": self._asked(one)} for one in rounds]
        responses = self._sampler.sample(prompts, self._params) if prompts else []
        said = [str(response["sequences"][0].get("decoded") or "") for response in responses]
        ids = [tuple(self._template.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in said]
        own = [
            replace(one, answer=text, answer_ids=of_one) for one, text, of_one in zip(rounds, said, ids, strict=True)
        ]
        scores = iter(self._inner.score([one for one in own if len(one.answer_ids) >= MIN_ANSWER_TOKENS]))
        return [next(scores) if len(one.answer_ids) >= MIN_ANSWER_TOKENS else Score(None) for one in own]

    def _asked(self, one: Round) -> list[Mapping[str, Any]]:
        shown = one.answer
        if len(one.answer_ids) > self._max_answer_tokens:
            shown = self._template.decode(one.answer_ids[: self._max_answer_tokens])
        told = PARAPHRASE.format(answer=shown)
        last = one.context[-1]
        if last.get("role") == "user" and isinstance(last.get("content"), str):
            return [*one.context[:-1], {**last, "content": f"{last['content']}\n\n{told}"}]
        return [*one.context, {"role": "user", "content": told}]


def _check_threshold(field: str, threshold: float | None) -> None:
    if threshold is not None and not 0 <= threshold <= 1:
        raise InvalidInput(field, f"is {threshold}; send a share of 0 to 1, or None")


class PassNScorer(Scorer):
    """The share of a model's own attempts that a judge calls right.

    Args:
        sampler: Makes the attempts.
        judge: Says yes or no; a sampler as well.
        num_samples: Attempts at each round.
        minimum: Rounds below this share do not pass: the model does not reach them.
        maximum: Nor do those above it: it knows them already.
        sampling_params: Of the attempts.
    """

    name = "pass_n"

    def __init__(
        self,
        sampler: Any,
        judge: Any,
        num_samples: int = 4,
        minimum: float = 0.0,
        maximum: float = 0.99,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> None:
        if num_samples < 1:
            raise InvalidInput("num_samples", f"is {num_samples}; send 1 or more")
        if not 0 <= minimum <= maximum <= 1:
            raise InvalidInput("minimum", f"is {minimum}, maximum {maximum}; send shares of 0 to 1")
        self._sampler = sampler
        self._judge = judge
        self._num_samples = num_samples
        self._bounds = (minimum, maximum)
        self._params = {"max_tokens": 512, **(sampling_params or {}), "num_samples": num_samples}

    def score(self, rounds: Sequence[Round]) -> list[Score]:
        """See :class:`Scorer`."""
        tried = self._sampler.sample([{"messages": list(one.context)} for one in rounds], self._params)
        asked = [
            VERDICT.format(question=_question(one), truth=one.answer, attempt=sequence.get("decoded") or "")
            for one, response in zip(rounds, tried, strict=True)
            for sequence in response["sequences"]
        ]
        prompts = [{"messages": [{"role": "user", "content": text}]} for text in asked]
        said = [
            str(response["sequences"][0].get("decoded") or "").strip().lower()
            for response in self._judge.sample(prompts, {"max_tokens": 4, "temperature": 0.0})
        ]
        low, high = self._bounds
        scores = []
        for start in range(0, len(said), self._num_samples):
            verdicts = [text for text in said[start : start + self._num_samples] if text.startswith(("yes", "no"))]
            share = sum(text.startswith("yes") for text in verdicts) / len(verdicts) if verdicts else None
            scores.append(Score(share, share is None or low <= share <= high))
        return scores


class ScoreFilter(QualityFilter):
    """Keeps the assistant's turns that every scorer lets pass, in ``key_rounds`` of ``user_data``, with their scores.

    Args:
        template: Of the model that scores.
        scorers: Asked in their order, each for all rounds in one call.
        backend: A sampler or :class:`LLMBackend`, for the scorers that were made without one.
        intents: Score only rows with one of these in ``intent``; other rows stay as they are.
        keep_if_no_key_rounds: Keep rows of whose turns none could be scored.
        drop_row_on_any_fail: Whether one turn that fails drops its row; else it drops the turn, and the row if none is
            left.
        max_prompt_tokens: What comes before a turn is cut to, from its beginning.
    """

    adds = ("user_data", "scores")

    def __init__(
        self,
        template: Any,
        scorers: Sequence[Scorer],
        intents: Collection[str] | None = None,
        keep_if_no_key_rounds: bool = False,
        drop_row_on_any_fail: bool = True,
        max_prompt_tokens: int = 1024,
        *,
        backend: Any = None,
    ) -> None:
        super().__init__()
        if not scorers:
            raise InvalidInput("scorers", "are none; send one or more")
        if max_prompt_tokens < 1:
            raise InvalidInput("max_prompt_tokens", f"is {max_prompt_tokens}; send 1 or more")
        self._template = template
        self._scorers = list(scorers)
        for scorer in self._scorers:
            if isinstance(scorer, Scorer) and scorer.source is None:
                scorer.source = backend
        self._intents = None if intents is None else frozenset(intents)
        self._keeps_unscored = keep_if_no_key_rounds
        self._drops_rows = drop_row_on_any_fail
        self._max_prompt_tokens = max_prompt_tokens

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """See :class:`QualityFilter`."""
        wanted = [self._intents is None or row.get("intent") in self._intents for row in rows]
        rounds = [self._rounds(row) if is_wanted else [] for row, is_wanted in zip(rows, wanted, strict=True)]
        flat = [one for of_row in rounds for one in of_row]
        scores = {scorer.name: iter(scorer.score(flat)) for scorer in self._scorers} if flat else {}
        kept = []
        for row, is_wanted, of_row in zip(rows, wanted, rounds, strict=True):
            judged = [(one, {name: next(some) for name, some in scores.items()}) for one in of_row]
            if not is_wanted or (not judged and self._keeps_unscored):
                kept.append(row)
                continue
            passed = [(one, by_name) for one, by_name in judged if all(score.passed for score in by_name.values())]
            if not passed or (self._drops_rows and len(passed) < len(judged)):
                self.leave(row, self._reason(judged))
            else:
                kept.append(_with_rounds(row, passed))
        return kept

    def _reason(self, judged: Sequence[tuple[Round, Mapping[str, Score]]]) -> str:
        failed = (name for _, by_name in judged for name, score in by_name.items() if not score.passed)
        return next(failed, "nothing to score")

    def _rounds(self, row: Row) -> list[Round]:
        messages = messages_of(row)
        given = user_data_get(row.get("user_data"), KEY_ROUNDS)
        numbers = given if given else [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        found = [self._round(messages, number) for number in numbers if 0 < number < len(messages)]
        return [one for one in found if len(one.answer_ids) >= MIN_ANSWER_TOKENS]

    def _round(self, messages: Sequence[Mapping[str, Any]], number: int) -> Round:
        context, answer = tuple(messages[:number]), text_of(messages[number].get("content"))
        prompt = self._template.encode({"messages": list(context)}, add_generation_prompt=True)["input_ids"]
        answer_ids = self._template.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return Round(context, answer, number, tuple(prompt[-self._max_prompt_tokens :].tolist()), tuple(answer_ids))


def _question(one: Round) -> str:
    return "\n\n".join(f"[{message.get('role')}] {text_of(message.get('content'))}" for message in one.context)


def _with_rounds(row: Row, passed: Sequence[tuple[Round, Mapping[str, Score]]]) -> Row:
    scores: dict[str, list[float | None]] = {}
    for number, (_, by_name) in enumerate(passed):
        for name, score in by_name.items():
            for key, value in {name: score.value, **score.details}.items():
                scores.setdefault(key, [None] * len(passed))[number] = value
    return {**row, "user_data": with_key_rounds(row, [one.number for one, _ in passed]), "scores": scores}
