"""Samples to sequences of tokens for one model, and what a person wants to know of them before a device is busy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from twinkle.core.errors import InvalidInput
from twinkle.data_format.row_error import RowError
from twinkle.dataset.preview import pieces_of
from twinkle.jobs.data import DataRequest, DataUse, TokenSequence
from twinkle.plugin.registry import Registry
from twinkle.template import Template
from twinkle.template.tokenizing import shifted, tokenize
from twinkle.template.truncation import IGNORED_LABEL, truncate
from twinkle.template.truncation import TokenRow as Labelled
from twinkle.workers.jobs.data_formats import Conversation, PlainText, Sample, Tokens

NUM_BINS = 10
NUM_PREVIEWED = 3

Truncation: TypeAlias = Literal["raise", "left", "right", "split", "delete"]


@dataclass(frozen=True, eq=False)
class _Whole:
    """A sample as tokens, however long, with the label that follows each and its weight."""

    row: Labelled
    weights: npt.NDArray[np.float32]


class Encoder:
    """One model's template, and how long a sequence may be."""

    def __init__(self, request: DataRequest, *, model_path: str, max_length: int, vocab_size: int) -> None:
        """Read the tokenizer.

        Args:
            request: What is asked.
            model_path: A folder with the model's tokenizer.
            max_length: What the model takes.
            vocab_size: The model's.

        Raises:
            InvalidInput: There is no such template, or the sequences are to be longer than the model takes.
        """
        known = Registry("twinkle.templates")
        if request.template not in known:
            raise InvalidInput("template", f"is {request.template!r}; send one of {', '.join(sorted(known))}")
        if request.max_length is not None and not 2 <= request.max_length <= max_length:
            raise InvalidInput("max_length", f"is {request.max_length}; send 2 to {max_length}, which the model takes")
        self.max_length = request.max_length or max_length
        self.truncation: Truncation = request.truncation
        self._use = request.use
        self._vocab_size = vocab_size
        self.template: Template = known[request.template](
            model_path,
            max_length=None,
            default_system=request.system,
            enable_thinking=request.enable_thinking,
        )

    def sequences(self, sample: Sample, report: DataMeasures) -> list[TokenSequence]:
        """A sample's sequences: one, none that is left out, or several that it is cut into.

        Raises:
            RowError: It cannot be encoded, is too long, or nothing of it trains.
        """
        whole = self._whole(sample)
        report.measure(whole, self)
        if self._use is not DataUse.PROMPTS and not whole.weights.any():
            raise RowError("", "has no token that trains")
        pieces = truncate(whole.row, self.max_length, self.truncation)
        starts = self._starts(len(whole.row.tokens))
        kept = [self._sequence(whole, piece, start) for piece, start in zip(pieces, starts, strict=False)]
        report.count_cut(whole, pieces, kept)
        return kept

    def _whole(self, sample: Sample) -> _Whole:
        if isinstance(sample, Tokens):
            return self._tokens(sample)
        if isinstance(sample, PlainText):
            return self._text(sample)
        return self._conversation(sample)

    def _conversation(self, sample: Conversation) -> _Whole:
        is_prompt = self._use is DataUse.PROMPTS
        row = self.template.encode(sample.trajectory(), add_generation_prompt=is_prompt)
        labels = np.asarray(row["labels"])
        return _Whole(Labelled(np.asarray(row["input_ids"]), labels), (labels >= 0).astype(np.float32))

    def _text(self, sample: PlainText) -> _Whole:
        """Text as it stands; what is trained on ends as the model ends a text."""
        tokenizer: Any = self.template.tokenizer
        spans = [(len(sample.prompt), len(sample.text))] if self._use is not DataUse.PROMPTS else []
        tokens, is_trained = tokenize(tokenizer, sample.text, spans)
        bos = tokenizer.bos_token_id
        if getattr(tokenizer, "add_bos_token", False) and bos is not None and tokens[0] != bos:
            tokens, is_trained = np.append(bos, tokens), np.append(False, is_trained)
        end = tokenizer.eos_token_id
        if spans and end is not None and tokens[-1] != end:
            tokens, is_trained = np.append(tokens, end), np.append(is_trained, True)
        labels = shifted(np.where(is_trained, tokens, IGNORED_LABEL))
        return _Whole(Labelled(tokens, labels), (labels >= 0).astype(np.float32))

    def _tokens(self, sample: Tokens) -> _Whole:
        tokens = np.asarray(sample.ids, dtype=np.int64)
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if len(wrong):
            place = int(wrong[0])
            raise RowError(
                f"input_ids[{place}]", f"is {int(tokens[place])}; the model knows tokens 0 to {self._vocab_size - 1}"
            )
        weights = np.append(np.asarray(sample.weights, dtype=np.float32)[1:], np.float32(0))
        if not np.isfinite(weights).all():
            raise RowError("weights", "must be finite numbers")
        return _Whole(Labelled(tokens, shifted(np.where(_ahead(weights) != 0, tokens, IGNORED_LABEL))), weights)

    def _starts(self, num_tokens: int) -> Sequence[int]:
        """Where what truncation leaves begins in the whole."""
        if num_tokens <= self.max_length or self.truncation == "right":
            return [0]
        if self.truncation == "left":
            return [num_tokens - self.max_length]
        return range(0, num_tokens, self.max_length)

    def _sequence(self, whole: _Whole, piece: Labelled, start: int) -> TokenSequence:
        weights = whole.weights[start : start + len(piece.tokens)] * (piece.labels >= 0)
        following = np.append(piece.tokens[1:], max(int(piece.labels[-1]), 0))
        tokens = piece.tokens
        if self._use is not DataUse.PROMPTS and weights[-1] == 0 and len(tokens) > 1:
            # The last token is a target alone: nothing that trains comes after it.
            tokens, following, weights = tokens[:-1], following[:-1], weights[:-1]
        return TokenSequence(tokens.astype(np.int32), following.astype(np.int32), weights.astype(np.float32))


def _ahead(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Weights at the places of their tokens again; the first token is nobody's target."""
    return np.append(np.float32(0), weights[:-1])


class DataMeasures:
    """Lengths before truncation, what this cuts, and how the first rows read."""

    def __init__(self, truncation: str, max_length: int) -> None:
        self.longest = 0
        self.num_trained = 0
        self._truncation = truncation
        self._max_length = max_length
        self._lengths = array("i")
        self._num_long = self._num_lost = self._num_lost_trained = 0
        self._previews: list[dict[str, Any]] = []
        self._place: Mapping[str, Any] = {}

    def at(self, *, line: int | None, row: int) -> None:
        """Where what comes next stands."""
        self._place = {"line": line, "row": row}

    def measure(self, whole: _Whole, encoder: Encoder) -> None:
        """Count a sequence before it is cut."""
        self._lengths.append(len(whole.row.tokens))
        self.longest = max(self.longest, len(whole.row.tokens))
        self.num_trained += int(np.count_nonzero(whole.weights))
        if len(self._previews) < NUM_PREVIEWED:
            row = {"input_ids": whole.row.tokens, "labels": whole.row.labels}
            pieces = [vars(piece) for piece in pieces_of(row, encoder.template)]
            self._previews.append({**self._place, "pieces": pieces})

    def count_cut(self, whole: _Whole, pieces: Sequence[Labelled], kept: Sequence[TokenSequence]) -> None:
        """Count what truncation has taken."""
        if len(whole.row.tokens) <= self._max_length:
            return
        self._num_long += 1
        self._num_lost += len(whole.row.tokens) - sum(len(piece.tokens) for piece in pieces)
        self._num_lost_trained += int(np.count_nonzero(whole.weights)) - sum(one.num_trained for one in kept)

    def report(self) -> dict[str, Any]:
        """All of it as plain values, as ``twinkle data check --json`` has them."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        return {
            "tokens": {
                "all": int(lengths.sum(dtype=np.int64)),
                "training": self.num_trained,
                "longest": self.longest,
                "median": _percentile(lengths, 50),
                "p95": _percentile(lengths, 95),
                "histogram": _histogram(lengths),
            },
            "truncation": {
                "strategy": self._truncation,
                "max_length": self._max_length,
                "rows": self._num_long,
                "tokens": self._num_lost,
                "training_tokens": self._num_lost_trained,
            },
            "preview": self._previews,
        }


def _percentile(lengths: npt.NDArray[np.int32], percent: float) -> int:
    return int(np.percentile(lengths, percent, method="higher")) if len(lengths) else 0


def _histogram(lengths: npt.NDArray[np.int32]) -> list[dict[str, int]]:
    if not len(lengths):
        return []
    width = max(1, -(-int(lengths.max()) // NUM_BINS))
    counts = np.bincount((lengths - 1) // width, minlength=1)
    return [
        {"from": index * width + 1, "to": (index + 1) * width, "rows": int(count)} for index, count in enumerate(counts)
    ]
