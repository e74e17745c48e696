"""Between a script's rows and the sampler's requests: a prompt in, the row extended by its continuation out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.continuation import Texts, continued_row, token_ids_of
from twinkle.data_format.sampling import SampledSequence, SampleResponse, SamplingParams, TokenLogprob
from twinkle.sampler.request import Adapter, DrawnSequence, SampleRequest, SampleResult, TopLogprobs


def request_of(
    row: Mapping[str, Any], params: SamplingParams, *, key: str, adapter: Adapter | None, seed: int
) -> SampleRequest:
    """Returns the request for one row.

    Raises:
        InvalidInput: ``stop`` mixes kinds.
    """
    stop_ids, stop_strings = _stops(params.stop)
    return SampleRequest(
        key=key,
        adapter=adapter,
        prompt=tuple(token_ids_of(row)),
        seed=seed,
        num_samples=params.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=stop_ids,
        stop_strings=stop_strings,
        prompt_logprobs=params.prompt_logprobs is not None,
        topk_prompt_logprobs=params.prompt_logprobs or 0,
        topk_sample_logprobs=params.logprobs if params.logprobs is not None and params.logprobs > 1 else 0,
    )


def response_of(
    result: SampleResult,
    row: Mapping[str, Any],
    params: SamplingParams,
    *,
    texts: Texts,
    plain_logprobs: bool = False,
    weights_version: int | None = None,
) -> SampleResponse:
    """Returns what the caller of ``sample`` gets for one row; ``plain_logprobs``: as numbers, where none were asked."""
    sequences = []
    for sequence in result.sequences:
        tokens: list[int] = sequence.tokens.tolist()
        sequences.append(
            SampledSequence(
                stop_reason=sequence.stop_reason,
                tokens=tokens,
                logprobs=sequence.logprobs.tolist()
                if plain_logprobs and params.logprobs is None
                else _logprobs(sequence, params.logprobs),
                decoded=None if texts.decode is None else texts.decode(tokens),
                new_input_feature=continued_row(row, tokens, texts=texts),
            )
        )
    scores, topk = result.prompt_logprobs, result.topk_prompt_logprobs
    return SampleResponse(
        sequences=sequences,
        prompt_token_ids=token_ids_of(row),
        prompt_logprobs=None if scores is None else [None, *scores[1:].tolist()],
        topk_prompt_logprobs=None if topk is None else [None, *_pairs(topk)[1:]],
        weights_version=weights_version,
    )


def _stops(stop: str | Sequence[str] | Sequence[int] | None) -> tuple[frozenset[int] | None, tuple[str, ...]]:
    if stop is None:
        return None, ()
    values = [stop] if isinstance(stop, str) else list(stop)
    strings = tuple(value for value in values if isinstance(value, str))
    token_ids = frozenset(value for value in values if isinstance(value, int))
    if len(strings) + len([value for value in values if isinstance(value, int)]) != len(values):
        raise InvalidInput("stop", "holds something that is neither a string nor a token id")
    return token_ids, strings


def _logprobs(sequence: DrawnSequence, wanted: int | None) -> list[list[TokenLogprob]] | None:
    if not wanted:
        return None
    if sequence.topk is not None:
        return _pairs(sequence.topk)
    return [[pair] for pair in zip(sequence.tokens.tolist(), sequence.logprobs.tolist(), strict=True)]


def _pairs(top: TopLogprobs) -> list[list[TokenLogprob]]:
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    ]
