"""Jobs whose loss compares datums, run as jobs of losses of one datum each, which is all the fused engine knows.

Such a loss C has the gradient of ``cross_entropy`` with the weights ``-dC/dlp`` (:mod:`twinkle.loss.surrogate`). So
its datums go through the model twice, each time in passes that other jobs share: for their logprobs, and for the
gradient. Between the two C is differentiated on the logprobs alone, on the CPU and in the same way on every rank; its
bits depend on the job's own datums only, as everything else does. Where C is linear the first pass is left out. Where
it counts entropies, the first pass gives these too, and the second adds their gradient.

Shapes: N tokens of a datum, K targets a token; B datums, T the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from twinkle.core.batch_loss import BATCH_LOSSES, TARGETS, WEIGHTS, judge_batch
from twinkle.core.errors import TwinkleError, UserError
from twinkle.core.slices import Slices
from twinkle.loss import DPOLoss, Loss, Surrogate, create_loss, differentiate
from twinkle.metric import DPOMetric
from twinkle.model.fused.embedding_jobs import compares_embeddings
from twinkle.model.fused.training import ENTROPY_WEIGHTS, Datum, TrainJob, TrainOutcome
from twinkle.module.adapter import Measure

Outcome = TrainOutcome | Exception


@runtime_checkable
class TwoPasses(Protocol):
    """A pass whose gradient depends on its logprobs, as a script's with a loss of its own has it."""

    def scoring(self) -> TrainJob:
        """The job that finds the logprobs."""
        ...

    def carrier_of(self, scores: TrainOutcome) -> TrainJob:
        """The job that has the gradient, now that they are known; whatever it raises is this pass's alone."""
        ...


Work = TrainJob | TwoPasses
RunJobs = Callable[[Sequence[TrainJob]], Slices[list[Outcome]]]

_IGNORED = -100
_CARRIER = "cross_entropy"


def run_with_batches(
    jobs: Sequence[Work],
    run: RunJobs,
    judge: Callable[[TrainJob], None],
    run_embedded: Callable[[TrainJob], Slices[Outcome]],
) -> Slices[list[Outcome]]:
    """The outcome of every job, in their order; of one that takes two passes that of the second.

    Args:
        jobs: Any jobs, those of :data:`twinkle.core.batch_loss.BATCH_LOSSES` among them.
        run: Runs jobs of losses of one datum.
        judge: Raises ``InvalidInput`` for the first thing wrong with a job's datums.
        run_embedded: Runs a job whose loss compares embeddings.
    """
    rounds = _Rounds(run)
    embedded: dict[int, TrainJob] = {}
    for index, job in enumerate(jobs):
        try:
            if not isinstance(job, TrainJob) or job.loss not in BATCH_LOSSES:
                rounds.take(index, job)
                continue
            judge(job)
            if compares_embeddings(job):
                embedded[index] = job
            else:
                rounds.take_batch(index, _Batch.of(job))
        except Exception as error:  # noqa: BLE001 - what one job's datums provoke must not reach its neighbours
            rounds.outcomes[index] = _without_frames(error)
    for index, job in embedded.items():
        rounds.outcomes[index] = yield from run_embedded(job)
    yield from rounds.score()
    yield from rounds.finish()
    return [rounds.outcomes[index] for index in range(len(jobs))]


class _Rounds:
    """What has to be scored first, what runs last, and what came of each, by the place of the job."""

    def __init__(self, run: RunJobs) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._run = run
        self._batches: dict[int, _Batch] = {}
        self._compared: dict[int, TwoPasses] = {}
        self._last: dict[int, TrainJob] = {}

    def take(self, index: int, job: Work) -> None:
        """A job of a loss of one datum, or one that brings its own two passes."""
        if isinstance(job, TrainJob):
            self._last[index] = job
        else:
            self._compared[index] = job

    def take_batch(self, index: int, batch: _Batch) -> None:
        """A job whose loss compares datums."""
        self._batches[index] = batch
        if batch.takes_one_pass:
            self._last[index] = batch.carrier(batch.gradient())
        else:
            self._compared[index] = batch

    def score(self) -> Slices[None]:
        """The first round: logprobs, and what they make of the second."""
        scoring: dict[int, TrainJob] = {}
        for index, each in self._compared.items():
            try:
                scoring[index] = each.scoring()
            except Exception as error:  # noqa: BLE001 - as below
                self.outcomes[index] = _without_frames(error)
        scored = yield from _run_some(list(scoring.values()), self._run)
        for index, scores in zip(scoring, scored, strict=True):
            each = self._compared[index]
            self.outcomes[index] = scores
            if isinstance(scores, Exception):
                continue
            try:
                carrier = each.carrier_of(scores)
            except Exception as error:  # noqa: BLE001 - what one job's numbers provoke must not reach its neighbours
                self.outcomes[index] = _without_frames(error)
                continue
            batch = self._batches.get(index)
            if batch is not None:
                self.outcomes[index] = _told(scores, batch.found_loss, batch.mean_entropy(scores))
            if batch is None or batch.job.backward:
                self._last[index] = carrier

    def finish(self) -> Slices[None]:
        """The second: gradients, and whatever takes one pass only."""
        places = sorted(self._last)
        outcomes = yield from _run_some([self._last[index] for index in places], self._run)
        for index, outcome in zip(places, outcomes, strict=True):
            if index in self._batches and not isinstance(outcome, Exception):
                self._batches[index].measure()
                # Told by its scores; one of one pass is the sum of its weighted logprobs, which its carrier came to.
                self.outcomes.setdefault(index, _told(outcome, outcome.loss))
            else:
                self.outcomes[index] = outcome


def _without_frames(error: Exception) -> Exception:
    """An error without what its frames hold; one that was raised on purpose holds nothing large."""
    return error if isinstance(error, TwinkleError) else error.with_traceback(None)


def _run_some(jobs: Sequence[TrainJob], run: RunJobs) -> Slices[list[Outcome]]:
    return (yield from run(jobs)) if jobs else []


@dataclass(eq=False)
class _Batch:
    """A job, its loss, and what the loss is called with beside the logprobs."""

    job: TrainJob
    loss: Loss
    labels: list[torch.Tensor]
    keywords: dict[str, torch.Tensor]
    found_loss: float = 0.0
    measures: dict[str, Measure] = field(default_factory=dict)

    @classmethod
    def of(cls, job: TrainJob) -> _Batch:
        """Read a job whose datums were judged."""
        settings = judge_batch(job.loss, job.loss_config, [datum.inputs for datum in job.data])
        rules = BATCH_LOSSES[job.loss]
        keywords = {
            name: pad_sequence([_values(datum, name) for datum in job.data], batch_first=True)
            for name in rules.known_inputs()
            if name in job.data[0].inputs
        }
        return cls(job, create_loss(job.loss, **settings), [_labels(datum) for datum in job.data], keywords)

    @property
    def takes_one_pass(self) -> bool:
        """Whether its gradient can be had without its logprobs."""
        return self.job.backward and self.loss.is_linear

    def gradient(self) -> Surrogate:
        """The gradient of a loss that depends on no logprob, taken at zeros."""
        zeros = [torch.zeros(self._targets(datum).shape) for datum in self.job.data]
        return differentiate(self.loss, zeros, self.labels, loss_kwargs=self.keywords)

    def scoring(self) -> TrainJob:
        """The job that finds the logprobs."""
        zeros = [np.zeros_like(self._targets(datum), dtype=np.float32) for datum in self.job.data]
        return self._carrying([{WEIGHTS: row} for row in zeros], backward=False)

    def carrier_of(self, scores: TrainOutcome) -> TrainJob:
        """The job that has the loss's gradient by these logprobs."""
        found = self.differentiate(scores)
        self.found_loss = found.loss
        self.measures = self._measured(scores)
        return self.carrier(found)

    def carrier(self, surrogate: Surrogate) -> TrainJob:
        """The job that has the loss's gradient."""
        inputs = [{WEIGHTS: _as_input(weights)} for weights in surrogate.weights]
        if surrogate.entropy_weights:
            for row, weights in zip(inputs, surrogate.entropy_weights, strict=True):
                row[ENTROPY_WEIGHTS] = _as_input(weights)
        return self._carrying(inputs, backward=True)

    def differentiate(self, scores: TrainOutcome) -> Surrogate:
        """The loss and its gradient by the logprobs, and by the entropies where it wants them."""
        logprobs, entropies = (
            [torch.from_numpy(np.array(row)) for row in rows] for rows in (scores.logprobs, scores.entropies)
        )
        found = differentiate(self.loss, logprobs, self.labels, loss_kwargs=self.keywords, entropies=entropies)
        require_finite(self.job.loss, found.loss, (*found.weights, *found.entropy_weights))
        return found

    def measure(self) -> None:
        """Count it in its adapter's window, now that its gradient is there."""
        self.job.adapter.measure(self.measures)

    def _measured(self, scores: TrainOutcome) -> dict[str, Measure]:
        """How the model ranks pairs, against their reference where there is one."""
        if not isinstance(self.loss, DPOLoss):
            return {}
        metric = DPOMetric(beta=self.loss.beta)
        labels, logprobs = (
            pad_sequence(rows, batch_first=True, padding_value=padding)
            for rows, padding in (
                (self.labels, _IGNORED),
                ([torch.from_numpy(np.array(row)) for row in scores.logprobs], 0.0),
            )
        )
        metric.accumulate({"labels": labels}, {"logps": logprobs}, ref_logps=self.keywords.get("ref_logps"))
        return {name: Measure(*found) for name, found in metric.sums().items()}

    def mean_entropy(self, scores: TrainOutcome) -> float | None:
        """Over the trained tokens, in nats, where the loss wants entropies."""
        if not scores.entropies:
            return None
        trained = [row[labels.numpy() != _IGNORED] for row, labels in zip(scores.entropies, self.labels, strict=True)]
        found = np.concatenate(trained)
        return float(found.mean()) if found.size else 0.0

    def _carrying(self, inputs: Sequence[Mapping[str, np.ndarray]], *, backward: bool) -> TrainJob:
        data = tuple(
            replace(datum, inputs={TARGETS: self._targets(datum), **row})
            for datum, row in zip(self.job.data, inputs, strict=True)
        )
        return replace(
            self.job,
            data=data,
            loss=_CARRIER,
            loss_config={},
            backward=backward,
            with_entropies=self.loss.require_entropy,
        )

    @staticmethod
    def _targets(datum: Datum) -> np.ndarray:
        return np.asarray(datum.inputs[TARGETS])


def _as_input(weights: torch.Tensor) -> np.ndarray:
    return weights.numpy().astype(np.float32)


def require_finite(name: str, loss: float, weights: Sequence[torch.Tensor]) -> None:
    """Raise ``UserError`` for a loss that has become NaN or infinite, or its gradient."""
    if not np.isfinite(loss) or not all(torch.isfinite(row).all() for row in weights):
        raise UserError(
            f"{name} is {loss} here, and it and its gradient must be finite; nothing of this operation was applied."
            " Check what the datums bring for it"
        )


def _labels(datum: Datum) -> torch.Tensor:
    """What is trained (N,): of several targets a token the first stands for all."""
    targets = torch.from_numpy(np.array(datum.inputs[TARGETS], dtype=np.int64))
    labels_N = targets if targets.dim() == 1 else targets[:, 0]
    if WEIGHTS not in datum.inputs:
        return labels_N
    return labels_N.masked_fill(torch.from_numpy(np.array(datum.inputs[WEIGHTS]) == 0), _IGNORED)


def _values(datum: Datum, name: str) -> torch.Tensor:
    values = torch.from_numpy(np.array(datum.inputs[name], dtype=np.float32))
    return values.expand(datum.tokens.size) if values.shape == (1,) else values


def _told(outcome: TrainOutcome, loss: float, mean_entropy: float | None = None) -> TrainOutcome:
    metrics = {"loss:sum": loss, "num_tokens:sum": float(outcome.num_tokens)}
    if mean_entropy is not None:
        metrics["entropy:mean"] = mean_entropy
    return replace(outcome, loss=loss, metrics=metrics, entropies=[])
