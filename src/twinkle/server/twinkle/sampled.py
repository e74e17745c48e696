"""What ``sample`` is answered: for each input its sequences, as the samplers of scripts give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinkle.data_format.continuation import Texts, continued_row
from twinkle.data_format.tool_calls import parse_tool_calls
from twinkle.server.model_texts import TextModel
from twinkle.wire.bodies.twinkle_sampling import TwinkleSequence
from twinkle.wire.json_pieces import with_array
from twinkle.wire.sample_result import EMPTY_LOGPROB, SampleResult, TopkLogprobs, WireSequence

Pairs = list[list[tuple[int, float]]]


def sampled(
    result: SampleResult, row: Mapping[str, Any], text_model: TextModel | None, *, is_scored_only: bool
) -> Iterator[bytes]:
    """What came of one input, a :class:`TwinkleSampled`, as pieces of JSON. Blocks for as long as decoding takes."""
    texts = _texts(text_model)
    sequences = (_sequence(sequence, row, texts, is_scored_only=is_scored_only) for sequence in result.sequences)
    yield from with_array({}, "sequences", sequences, _scores_of_prompt(result, row))


def _scores_of_prompt(result: SampleResult, row: Mapping[str, Any]) -> dict[str, object]:
    scores, topk = result.prompt_logprobs, result.topk_prompt_logprobs
    return {
        "prompt_token_ids": row["input_ids"],
        "prompt_logprobs": None if scores is None else [None, *scores[1:].tolist()],
        "topk_prompt_logprobs": None if topk is None else [None, *_pairs(topk)[1:]],
    }


def _sequence(sequence: WireSequence, row: Mapping[str, Any], texts: Texts, *, is_scored_only: bool) -> TwinkleSequence:
    # To score a prompt alone one token is drawn, which nobody has asked for.
    tokens: list[int] = [] if is_scored_only else sequence.tokens.tolist()
    return TwinkleSequence(
        stop_reason="length" if is_scored_only else sequence.stop_reason,
        tokens=tokens,
        logprobs=_logprobs(sequence, tokens),
        decoded=None if texts.decode is None else texts.decode(tokens),
        new_input_feature=continued_row(row, tokens, texts=texts),
    )


def _logprobs(sequence: WireSequence, tokens: Sequence[int]) -> Pairs:
    """Of the chosen tokens, or of the likeliest where more were asked for; never nothing."""
    if sequence.topk is not None:
        return _pairs(sequence.topk)[: len(tokens)]
    scores: list[float] = sequence.logprobs.tolist()
    return [[pair] for pair in zip(tokens, scores[: len(tokens)], strict=True)]


def _pairs(top: TopkLogprobs) -> Pairs:
    rows = zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return [[pair for pair in zip(ids, scores, strict=True) if pair[1] > EMPTY_LOGPROB] for ids, scores in rows]


def _texts(text_model: TextModel | None) -> Texts:
    if text_model is None:
        return Texts()
    return Texts(decode=text_model.decode_all, read=text_model.decode, parse_tool_calls=parse_tool_calls)
