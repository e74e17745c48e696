"""Results in OpenAI's shapes: choices, logprobs, counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson
from fastapi import Response

from twinkle.server.errors import JSON
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.drawing import Drawing
from twinkle.server.openai.ordering import Drawn
from twinkle.wire.sample_result import EMPTY_LOGPROB, WireSequence

JsonObject = dict[str, object]

# What OpenAI writes for a token of probability zero; JSON has no infinity.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Tokens of a text in a row, each with its logprob, the likeliest in its place, and where in the text it begins."""

    tokens: list[int]
    logprobs: list[float]
    topk: list[list[tuple[int, float]]]
    offsets: list[int]

    def part(self, start: int, end: int) -> Scores:
        """Those of some of the tokens."""
        return Scores(
            tokens=self.tokens[start:end],
            logprobs=self.logprobs[start:end],
            topk=self.topk[start:end],
            offsets=self.offsets[start:end],
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One sample as its reader sees it. ``num_scored`` of its tokens are within the text."""

    index: int
    text: str
    finish_reason: str
    tokens: list[int]
    logprobs: list[float]
    topk: list[list[tuple[int, float]]]
    num_scored: int

    def scores(self, text_model: TextModel | None) -> Scores:
        """What is known of the tokens within the text."""
        tokens = self.tokens[: self.num_scored]
        return Scores(
            tokens=tokens,
            logprobs=self.logprobs[: self.num_scored],
            topk=self.topk[: self.num_scored],
            offsets=[0] * len(tokens) if text_model is None else text_model.offsets(tokens),
        )


def choices_of(
    drawn: Sequence[Drawn], drawings: Sequence[Drawing], text_model: TextModel | None, *, first_index: int = 0
) -> list[Choice]:
    """All samples of these prompts, in order. Blocks for as long as decoding takes."""
    return list(each_choice(drawn, drawings, text_model, first_index=first_index))


def each_choice(
    drawn: Sequence[Drawn], drawings: Sequence[Drawing], text_model: TextModel | None, *, first_index: int = 0
) -> Iterator[Choice]:
    """The same one by one: what a sample takes as objects is many times its result."""
    sequences = [
        (sequence, drawing) for one, drawing in zip(drawn, drawings, strict=True) for sequence in one.result.sequences
    ]
    for i, (sequence, drawing) in enumerate(sequences, start=first_index):
        yield _choice(i, sequence, drawing.stops, text_model)


def _choice(index: int, sequence: WireSequence, stops: Sequence[str], text_model: TextModel | None) -> Choice:
    tokens = [int(token) for token in sequence.tokens]
    text, num_scored = "", len(tokens)
    if text_model is not None:
        text = text_model.decode(tokens)
        if sequence.stop_reason == "stop":
            ends = [place for stop in stops if (place := text.find(stop)) >= 0]
            text = text[: min(ends, default=len(text))]
            num_scored = sum(offset < len(text) for offset in text_model.offsets(tokens))
    topk: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if sequence.topk is not None:
        rows = zip(sequence.topk.token_ids.tolist(), sequence.topk.logprobs.tolist(), strict=True)
        topk = [[cell for cell in zip(ids, scores, strict=True) if cell[1] > EMPTY_LOGPROB] for ids, scores in rows]
    return Choice(
        index=index,
        text=text,
        finish_reason=sequence.stop_reason,
        tokens=tokens,
        logprobs=sequence.logprobs.tolist(),
        topk=topk,
        num_scored=num_scored,
    )


def bytes_of(drawn: Sequence[Drawn]) -> int:
    """What the results take as they are."""
    return sum(one.result.size_bytes for one in drawn)


def usage_of(drawn: Sequence[Drawn], drawings: Sequence[Drawing]) -> JsonObject:
    """The counts: each prompt once, however many samples were drawn from it."""
    prompt = sum(len(drawing.tokens) for drawing in drawings)
    completion = sum(len(sequence.tokens) for one in drawn for sequence in one.result.sequences)
    cached = sum(one.result.prompt_cache_hit_tokens for one in drawn)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def completion_logprobs(scores: Scores, text_model: TextModel | None) -> JsonObject:
    """The ``logprobs`` of ``/v1/completions``: parallel lists. The drawn token is always among the likeliest."""
    likeliest = [
        {_piece(t, text_model): _finite(score) for t, score in [*scores.topk[i], (token, scores.logprobs[i])]}
        for i, token in enumerate(scores.tokens)
    ]
    return {
        "tokens": [_piece(token, text_model) for token in scores.tokens],
        "token_logprobs": [_finite(logprob) for logprob in scores.logprobs],
        "top_logprobs": likeliest,
        "text_offset": scores.offsets,
    }


def chat_logprobs(scores: Scores, text_model: TextModel) -> JsonObject:
    """The ``logprobs`` of ``/v1/chat/completions``: one object for each token."""
    content = [
        {
            **_scored(token, scores.logprobs[i], text_model),
            "top_logprobs": [_scored(t, score, text_model) for t, score in scores.topk[i]],
        }
        for i, token in enumerate(scores.tokens)
    ]
    return {"content": content, "refusal": None}


def json_answer(body: Mapping[str, object]) -> Response:
    """A whole answer."""
    return Response(orjson.dumps(body), media_type=JSON)


def _scored(token: int, logprob: float, text_model: TextModel) -> JsonObject:
    piece = text_model.piece(token)
    whole = "\N{REPLACEMENT CHARACTER}" not in piece
    return {"token": piece, "logprob": _finite(logprob), "bytes": list(piece.encode()) if whole else None}


def _piece(token: int, text_model: TextModel | None) -> str:
    return f"token_id:{token}" if text_model is None else text_model.piece(token)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
