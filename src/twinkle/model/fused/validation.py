"""Refusing a job before it runs, naming the field, the limit and what to do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinkle.core.batch_loss import BATCH_LOSSES, GROUP_LABELS, TARGETS, WEIGHTS, BatchLossRules, judge_batch
from twinkle.core.errors import InvalidInput
from twinkle.core.loss_graph import LossGraph
from twinkle.core.pictures import PictureRules
from twinkle.loss import DatumLoss, TracedLoss, create_datum_loss
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
from twinkle.model.pictures import check_pictures

MOST_COMPARISONS = 1 << 24
"""Of a query with a document, in one operation: what compares them keeps a number for each pair."""


@dataclass(frozen=True, kw_only=True)
class JobRules:
    """What one model takes: its vocabulary, its context, its pictures, and how long a datum the device has room for.

    ``refuse_oversized`` gets the lengths of a job's datums that are to be trained on, and raises ``InvalidInput``.
    """

    vocab_size: int
    max_context_length: int
    picture_rules: PictureRules | None
    refuse_oversized: Callable[[Sequence[int]], None]

    def loss_of(self, job: TrainJob) -> DatumLoss:
        """Raise ``InvalidInput`` for the first thing wrong with a job; return its loss."""
        return validate_job(
            job,
            vocab_size=self.vocab_size,
            max_context_length=self.max_context_length,
            picture_rules=self.picture_rules,
        )

    def loss_or_refusal(self, job: TrainJob) -> DatumLoss | Exception:
        """The loss of a job, or what is wrong with it. What was accepted once is not refused for its size."""
        try:
            loss = self.loss_of(job)
            if job.backward and not job.is_again:
                self.refuse_oversized([datum.tokens.size for datum in job.data])
        except InvalidInput as error:
            return error
        return loss

    def judge_batch(self, job: TrainJob) -> None:
        """Raise ``InvalidInput`` for the first thing wrong with a job of a loss over the batch."""
        validate_batch(
            job,
            vocab_size=self.vocab_size,
            max_context_length=self.max_context_length,
            picture_rules=self.picture_rules,
        )


def validate_job(
    job: TrainJob, *, vocab_size: int, max_context_length: int, picture_rules: PictureRules | None = None
) -> DatumLoss:
    """Raise ``InvalidInput`` for the first thing wrong with ``job``; return its loss."""
    loss = create_datum_loss(job.loss, job.loss_config, job.graph)
    _validate_data(job, vocab_size, max_context_length, picture_rules)
    for index, datum in enumerate(job.data):
        if isinstance(loss, TracedLoss):
            _validate_traced(f"data[{index}].loss_fn_inputs", datum, loss.graph, vocab_size)
        else:
            _validate_inputs(f"data[{index}].loss_fn_inputs", datum, loss, vocab_size)
    return loss


def validate_batch(
    job: TrainJob, *, vocab_size: int, max_context_length: int, picture_rules: PictureRules | None = None
) -> None:
    """The same for a job of a loss over the batch (:data:`twinkle.core.batch_loss.BATCH_LOSSES`)."""
    rules = BATCH_LOSSES[job.loss]
    if rules.embeds:
        _validate_data(job, vocab_size, max_context_length, None)
        _validate_groups(job)
        return
    _validate_data(job, vocab_size, max_context_length, picture_rules)
    for index, datum in enumerate(job.data):
        _validate_row(f"data[{index}].loss_fn_inputs", datum, job.loss, rules, vocab_size)
    if rules.top_k_targets:
        _validate_candidates(job)


def validate_adam(params: AdamParams) -> None:
    """Raise ``InvalidInput`` for a setting no step can be made with."""
    limits: Mapping[str, tuple[float, float]] = {
        "learning_rate": (params.learning_rate, math.inf),
        "beta1": (params.beta1, 1.0),
        "beta2": (params.beta2, 1.0),
        "eps": (params.eps, math.inf),
        "weight_decay": (params.weight_decay, math.inf),
        "grad_clip_norm": (params.grad_clip_norm, math.inf),
    }
    for name, (value, upper) in limits.items():
        if not (math.isfinite(value) and 0 <= value < upper):
            bound = "at least 0" if math.isinf(upper) else f"in [0, {upper:g})"
            raise InvalidInput(f"adam_params.{name}", f"is {value}, must be finite and {bound}")


def _validate_data(job: TrainJob, vocab_size: int, max_context_length: int, picture_rules: PictureRules | None) -> None:
    if job.backward and not job.adapter.trainable:
        raise InvalidInput("model_id", "this adapter was loaded for sampling only; create or load one to train")
    if not job.data:
        raise InvalidInput("data", "is empty; send at least one datum")
    for index, datum in enumerate(job.data):
        field = f"data[{index}].model_input"
        _validate_tokens(field, datum.tokens, vocab_size, max_context_length)
        check_pictures(field, datum.tokens, datum.pictures, picture_rules)


def _validate_tokens(field: str, tokens: np.ndarray, vocab_size: int, max_context_length: int) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidInput(field, f"has shape {tokens.shape} and dtype {tokens.dtype}, must be a list of token ids")
    if tokens.size == 0:
        raise InvalidInput(field, "is empty; send at least one token")
    if tokens.size > max_context_length:
        raise InvalidInput(
            field, f"has {tokens.size} tokens, the model's context is {max_context_length}; shorten or split it"
        )
    _validate_ids(field, tokens, vocab_size)


def _validate_ids(field: str, ids: np.ndarray, vocab_size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidInput(
            field, f"holds the token id {wrong}, the vocabulary is 0 to {vocab_size - 1}; use this model's tokenizer"
        )


def _validate_inputs(field: str, datum: Datum, loss: DatumLoss, vocab_size: int) -> None:
    required = ("target_tokens", *loss.required_inputs)
    for name in required:
        if name not in datum.inputs:
            raise InvalidInput(f"{field}.{name}", f"is missing; {loss.name} needs {', '.join(required)}")
    targets = datum.inputs["target_tokens"]
    allowed_ranks = (1, 2) if loss.top_k_targets else (1,)
    _validate_targets(f"{field}.target_tokens", targets, datum, allowed_ranks, vocab_size)
    for name in (*loss.required_inputs, *loss.optional_inputs):
        if name in datum.inputs:
            _validate_values(f"{field}.{name}", datum.inputs[name], targets.shape)


def _validate_groups(job: TrainJob) -> None:
    settings = judge_batch(job.loss, job.loss_config, [datum.inputs for datum in job.data])
    marks = []
    for index, datum in enumerate(job.data):
        given = datum.inputs[GROUP_LABELS]
        if given.shape != (1,) or given.item() not in (0, 1):
            raise InvalidInput(
                f"data[{index}].loss_fn_inputs.{GROUP_LABELS}", "must be one value: 1 for a query, 0 for a document"
            )
        marks.append(int(given.item()))
    for index, (mark, following) in enumerate(itertools.pairwise([0, *marks, 1])):
        if index == 0 and following == 0:
            raise InvalidInput(f"data[0].loss_fn_inputs.{GROUP_LABELS}", "must be 1: a group begins with its query")
        if index and mark == following == 1:
            raise InvalidInput(f"data[{index - 1}]", "is a query without a document; its positive comes next")
    num_queries = sum(marks)
    num_documents = len(marks) - num_queries
    if settings.get("hard_negatives") is not None:
        num_documents = num_queries * (1 + max(0, int(settings["hard_negatives"])))
    if num_queries * num_documents > MOST_COMPARISONS:
        raise InvalidInput(
            "data",
            f"has {num_queries} queries and {num_documents} documents to compare them with, which makes more than"
            f" {MOST_COMPARISONS} pairs; send fewer rows in one operation",
        )


def _validate_row(field: str, datum: Datum, name: str, rules: BatchLossRules, vocab_size: int) -> None:
    if TARGETS not in datum.inputs:
        raise InvalidInput(f"{field}.{TARGETS}", f"is missing; {name} needs it")
    targets = datum.inputs[TARGETS]
    _validate_targets(f"{field}.{TARGETS}", targets, datum, (2,) if rules.top_k_targets else (1,), vocab_size)
    if WEIGHTS in datum.inputs:
        weights = datum.inputs[WEIGHTS]
        _validate_values(f"{field}.{WEIGHTS}", weights, datum.tokens.shape)
        if not np.isin(weights, (0, 1)).all():
            raise InvalidInput(
                f"{field}.{WEIGHTS}", f"holds values other than 0 and 1; {name} trains a token or does not"
            )
    for key in rules.known_inputs():
        if key in datum.inputs:
            values = datum.inputs[key]
            alone = values.shape == (1,) and not rules.top_k_targets
            _validate_values(f"{field}.{key}", values, values.shape if alone else targets.shape)


def _validate_candidates(job: TrainJob) -> None:
    """The loss is one of a batch, whose tokens have as many candidates in every datum."""
    numbers = [datum.inputs[TARGETS].shape[1] for datum in job.data]
    for index, number in enumerate(numbers):
        if number != numbers[0]:
            raise InvalidInput(
                f"data[{index}].loss_fn_inputs.{TARGETS}",
                f"has {number} candidates for each token, data[0] has {numbers[0]}; send as many for every datum,"
                " or one operation for each number",
            )


def _validate_traced(field: str, datum: Datum, graph: LossGraph, vocab_size: int) -> None:
    """Ranks alone: what a client's own loss makes of sizes and values is its own affair."""
    logprobs, *others = graph.inputs
    for name, rank in [("target_tokens", logprobs.rank), *((declared.name, declared.rank) for declared in others)]:
        if name not in datum.inputs:
            raise InvalidInput(f"{field}.{name}", f"is missing; the custom loss {graph.name!r} takes it")
        values = datum.inputs[name]
        # The wire writes a scalar as it writes a list of one.
        is_scalar = rank == 0 and values.ndim == 1 and values.size == 1
        if values.ndim != rank and not is_scalar:
            raise InvalidInput(
                f"{field}.{name}",
                f"has shape {values.shape}, but the custom loss {graph.name!r} was declared with rank {rank}",
            )
    targets = datum.inputs["target_tokens"]
    _validate_targets(f"{field}.target_tokens", targets, datum, (logprobs.rank,), vocab_size)


def _validate_targets(
    field: str, targets: np.ndarray, datum: Datum, allowed_ranks: tuple[int, ...], vocab_size: int
) -> None:
    if targets.dtype.kind not in "iu":
        raise InvalidInput(field, f"has dtype {targets.dtype}, must be int64")
    num_tokens = datum.tokens.size
    if targets.ndim not in allowed_ranks or targets.shape[0] != num_tokens or targets.size == 0:
        expected = " or ".join(f"({num_tokens},)" if rank == 1 else f"({num_tokens}, K)" for rank in allowed_ranks)
        raise InvalidInput(field, f"has shape {targets.shape}, must be {expected}, one row for each input token")
    _validate_ids(field, targets, vocab_size)


def _validate_values(field: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise InvalidInput(field, f"has shape {values.shape}, must be {shape}, like target_tokens")
    if values.dtype.kind not in "fiub":
        raise InvalidInput(field, f"has dtype {values.dtype}, must be float32")
    if not np.isfinite(values).all():
        raise InvalidInput(field, "holds a value that is not finite")
