"""Rows by how hard what is said in them is for a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

from twinkle.core.errors import InvalidInput
from twinkle_agentic.preprocessor.llm_backend import LLMBackend, SamplerBackend, backend_of, chosen_backend
from twinkle_agentic.preprocessor.scores import IFDScorer, Round, Score, ScoreFilter, Scorer, answer_gains

SHARES = (50, 75)
"""Of tokens, in percent, that S-IFD is told for."""


class SIFDScorer(Scorer):
    """Selective instruction-following difficulty: IFD over the tokens that the question changes most.

    With the gain of a token, ``log p(token | question, before) - log p(token | before)``, it is exp of minus the mean
    gain over the share of tokens of the largest absolute gain (S-IFD; Fu et al., 2025, "T-SHIRT: Token-Selective
    Hierarchical Data Selection for Instruction Tuning"). The score is that of three quarters of the tokens; ``ifd`` (of
    all), ``s_ifd_50``, ``s_ifd_75`` and ``mean_delta`` (the mean gain, in nats) stand beside it in ``scores``.

    Args:
        sampler: Whose prompt logprobs are read, or an :class:`LLMBackend`; the filter's if omitted.
        ifd_threshold: Rounds below it do not pass, they are easy; None lets all pass, for their scores alone.
    """

    name = "s_ifd"

    def __init__(self, sampler: Any = None, ifd_threshold: float | None = None) -> None:
        if ifd_threshold is not None and ifd_threshold < 0:
            raise InvalidInput("ifd_threshold", f"is {ifd_threshold}; send 0 or more, or None")
        self.source = sampler
        self._threshold = ifd_threshold

    def score(self, rounds: Sequence[Round]) -> list[Score]:
        """See :class:`Scorer`."""
        return [self._score(gains) for gains in answer_gains(self.source, rounds)]

    def _score(self, gains: Sequence[float]) -> Score:
        by_share = {f"s_ifd_{percent}": selective_ifd(gains, percent / 100) for percent in SHARES}
        details = {**by_share, "ifd": selective_ifd(gains, 1.0), "mean_delta": sum(gains) / len(gains)}
        value = by_share[f"s_ifd_{SHARES[-1]}"]
        return Score(value, self._threshold is None or value >= self._threshold, details)


def selective_ifd(gains: Sequence[float], share: float) -> float:
    """exp of minus the mean of the largest gains in absolute value: of this share of them, rounded up."""
    number = math.ceil(share * len(gains))
    largest = sorted(gains, key=abs, reverse=True)[:number]
    return math.exp(-sum(largest) / number)


class PerplexityScorer(Scorer):
    """The perplexity of a turn after all that came before it: exp of minus the mean logprob of its tokens.

    Args:
        sampler: Whose prompt logprobs are read, or an :class:`LLMBackend`; the filter's if omitted.
        minimum: Rounds below it do not pass: the model says them by heart.
        maximum: Nor do those above it: they are no language that it knows.
    """

    name = "perplexity"

    def __init__(self, sampler: Any = None, minimum: float = 1.0, maximum: float = 1000.0) -> None:
        if not 0 <= minimum <= maximum:
            raise InvalidInput("ppl_min", f"is {minimum}, ppl_max {maximum}; send 0 or more, and no smaller maximum")
        self.source = sampler
        self._bounds = (minimum, maximum)

    def score(self, rounds: Sequence[Round]) -> list[Score]:
        """See :class:`Scorer`."""
        if self.source is None:
            raise InvalidInput("backend", "is missing; send one to the filter, or a sampler to the scorer")
        prompts = [(*one.prompt_ids, *one.answer_ids) for one in rounds]
        scored = backend_of(self.source).prompt_logprobs_ids(prompts)
        low, high = self._bounds
        scores = []
        for values, one in zip(scored, rounds, strict=True):
            of_answer = [value for value in values[-len(one.answer_ids) :] if value is not None]
            perplexity = math.exp(-sum(of_answer) / len(of_answer))
            scores.append(Score(perplexity, low <= perplexity <= high))
        return scores


class ModelPlace(TypedDict, total=False):
    """Where a :class:`DifficultyFilter` finds its model, unless a ``backend`` and a ``template`` are sent."""

    tokenizer_name_or_path: str
    """The model to make a template of."""
    api_endpoint: str
    """A server of OpenAI's protocol in place of a backend."""
    model: str
    """Its name there."""


class DifficultyFilter(ScoreFilter):
    """A filter by one scorer that reads the logprobs of a model.

    Args:
        make_scorer: Of the backend that is found.
        backend: A sampler, or an :class:`LLMBackend`.
        template: Of the same model; the sampler's own, or that of ``tokenizer_name_or_path``, if omitted.
        keep_if_no_key_rounds: Keep rows of whose turns none could be scored.
        drop_row_on_any_fail: Whether one turn that fails drops its row; else it drops the turn.
        max_prompt_tokens: What comes before a turn is cut to, from its beginning.
        place: The model in words (:class:`ModelPlace`).
    """

    def __init__(
        self,
        make_scorer: Callable[[LLMBackend], Scorer],
        backend: Any,
        template: Any,
        *,
        keep_if_no_key_rounds: bool,
        drop_row_on_any_fail: bool,
        max_prompt_tokens: int,
        **place: Unpack[ModelPlace],
    ) -> None:
        asked = chosen_backend(backend, api_endpoint=place.get("api_endpoint", ""), model=place.get("model", "default"))
        super().__init__(
            chosen_template(template, asked, place.get("tokenizer_name_or_path", "")),
            [make_scorer(asked)],
            keep_if_no_key_rounds=keep_if_no_key_rounds,
            drop_row_on_any_fail=drop_row_on_any_fail,
            max_prompt_tokens=max_prompt_tokens,
        )


class PerplexityFilter(DifficultyFilter):
    """Keeps rows in which every turn that trains has a perplexity within bounds (:class:`PerplexityScorer`).

    Args:
        ppl_min: The least perplexity.
        ppl_max: The largest.
        drop_row_on_any_fail: Whether one turn out of bounds drops its row; else it drops the turn.
        backend, template, max_prompt_tokens, place: As for every :class:`DifficultyFilter`.
    """

    def __init__(
        self,
        backend: Any = None,
        template: Any = None,
        ppl_min: float = 1.0,
        ppl_max: float = 1000.0,
        *,
        drop_row_on_any_fail: bool = True,
        max_prompt_tokens: int = 1024,
        **place: Unpack[ModelPlace],
    ) -> None:
        super().__init__(
            lambda asked: PerplexityScorer(asked, ppl_min, ppl_max),
            backend,
            template,
            keep_if_no_key_rounds=True,
            drop_row_on_any_fail=drop_row_on_any_fail,
            max_prompt_tokens=max_prompt_tokens,
            **place,
        )


class IFDFilter(DifficultyFilter):
    """Keeps the turns whose instruction-following difficulty (:class:`IFDScorer`) is high enough, and rows with any.

    Args:
        ifd_threshold: Turns below it are easy, and no longer train (``key_rounds``). Those above 1 are misled by their
            question, and do not either.
        backend, template, keep_if_no_key_rounds, max_prompt_tokens, place: As for every :class:`DifficultyFilter`.
    """

    def __init__(
        self,
        backend: Any = None,
        template: Any = None,
        ifd_threshold: float = 0.5,
        keep_if_no_key_rounds: bool = False,
        max_prompt_tokens: int = 1024,
        **place: Unpack[ModelPlace],
    ) -> None:
        if not 0 <= ifd_threshold < 1:
            raise InvalidInput("ifd_threshold", f"is {ifd_threshold}; send 0 or more, below 1")
        super().__init__(
            lambda asked: IFDScorer(asked, ifd_threshold, 1.0),
            backend,
            template,
            keep_if_no_key_rounds=keep_if_no_key_rounds,
            drop_row_on_any_fail=False,
            max_prompt_tokens=max_prompt_tokens,
            **place,
        )


def chosen_template(template: Any, backend: LLMBackend, model_id: str) -> Any:
    """The one that is sent, else that of the model, else the sampler's.

    Raises:
        InvalidInput: There is none.
    """
    if template is not None:
        return template
    if model_id:
        # Brings transformers, which rules do without.
        from twinkle.template import Template  # noqa: PLC0415

        return Template(model_id)
    own = getattr(backend.sampler, "template", None) if isinstance(backend, SamplerBackend) else None
    if own is None:
        raise InvalidInput("template", "is missing; send one of the model that scores, or set the sampler's")
    return own
