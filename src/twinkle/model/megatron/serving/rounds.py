"""The datums of one job as micro-batches of the pipeline, and what its loss says of their outputs.

How a job is cut depends on nothing but the job, so that its sums are made in the same order whoever else is served.

Shapes: L tokens of a datum, K targets a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from twinkle.core.batch_loss import CORRECT_TOKENS
from twinkle.core.errors import UserError
from twinkle.infra.sending import send
from twinkle.loss.datum import Evaluation
from twinkle.loss.operation_work import TooMuchWork
from twinkle.model.fused.job_run import JobRun
from twinkle.model.fused.training import ENTROPY_WEIGHTS, Datum
from twinkle.model.megatron.batch import Sequences
from twinkle.model.megatron.pipeline import Objective, RowOutputs, Wanted

MicroBatch = list[int]
"""The numbers of some of a job's datums."""


def rounds_of(data: Sequence[Datum], *, tokens_per_part: int, at_once: int) -> Iterator[list[MicroBatch]]:
    """A job's datums by what is computed at once: a micro-batch for each stage of each pipeline, if there are as many.

    Args:
        data: Of the job, each of which stays whole.
        tokens_per_part: About how many tokens a micro-batch has at most.
        at_once: Stages of all pipelines.
    """
    total = sum(datum.tokens.size for datum in data)
    limit = min(tokens_per_part, -(-total // at_once))
    parts: list[MicroBatch] = []
    current: MicroBatch = []
    num_tokens = 0
    for index, datum in enumerate(data):
        # Labels of one micro-batch have one shape.
        is_alike = not current or _num_targets(datum) == _num_targets(data[current[0]])
        if current and (num_tokens + datum.tokens.size > limit or not is_alike):
            parts.append(current)
            current, num_tokens = [], 0
        current.append(index)
        num_tokens += datum.tokens.size
    parts.append(current)
    for start in range(0, len(parts), at_once):
        yield parts[start : start + at_once]


class JobRound:
    """Some micro-batches of one job on their way through the stages.

    Args:
        run: The job.
        parts: The micro-batches.
        device: Where their tensors are.
        num_idle: How many passes of a token that nobody asked for follow: ranks that share experts make as many each.
    """

    def __init__(self, run: JobRun, parts: Sequence[MicroBatch], device: torch.device, *, num_idle: int = 0) -> None:
        self._run = run
        self._parts = parts
        self._device = device
        token = torch.zeros(1, dtype=torch.int64, device=device)
        self.sequences = [*(self._sequences(part) for part in parts), *[Sequences((token,), (token,))] * num_idle]
        self.wanted = Wanted(
            temperature=1.0, logps=True, logits=False, entropies=run.job.with_entropies, best=self._counts()
        )

    def objective(self) -> Objective | None:
        """What to differentiate; None of a job without a backward pass.

        The gradient of the loss by the logprobs is found apart from the graph, as the fused engine does; a loss that
        cannot be computed has none here, and ends its job when the outcome is read, on every rank alike.
        """
        return self._value if self._run.job.backward else None

    def _value(self, number: int, outputs: RowOutputs) -> torch.Tensor:
        total = outputs["logps"][0].flatten()[:0].sum()
        if number >= len(self._parts):
            return total
        for place, index in enumerate(self._parts[number]):
            logps = outputs["logps"][place]
            total = total + (logps * self._slope(index, logps)).sum()
            if self._run.job.with_entropies:
                weights_L = torch.from_numpy(np.array(self._datum(index).inputs[ENTROPY_WEIGHTS], dtype=np.float32))
                total = total - (outputs["entropies"][place] * weights_L.to(self._device)).sum()
        return total

    def _slope(self, index: int, logps: torch.Tensor) -> torch.Tensor:
        try:
            return self._evaluate(index, logps.detach()).d_logprobs
        except UserError:
            return torch.zeros_like(logps)

    def record(self, parts: Sequence[MicroBatch], found: Sequence[RowOutputs]) -> None:
        """Take the outcome of every datum of micro-batches, this rank's or others', or why the job has failed."""
        run = self._run
        for part, outputs in zip(parts, found, strict=True):
            for place, index in enumerate(part):
                if run.failure is None:
                    self._record(index, {name: rows[place] for name, rows in outputs.items()})
        run.judge_work()

    def _record(self, index: int, outputs: dict[str, torch.Tensor]) -> None:
        run, work = self._run, self._run.work
        logps = outputs["logps"]
        try:
            if work is not None and (refusal := work.refusal(work.spent)) is not None:
                raise refusal
            found = self._evaluate(index, logps)
        except TooMuchWork as error:
            run.fail(error)
            return
        except UserError as error:
            run.fail(UserError(f"data[{index}]: {error.message}"))
            return
        if work is not None:
            work.spent += found.work
        metrics = found.metrics
        counted = run.loss.counted(self._inputs(index))
        if counted is not None:
            targets = self._targets(index)
            first = targets if targets.dim() == 1 else targets[:, 0]
            metrics = {**metrics, CORRECT_TOKENS: float(((outputs["best"] == first) & counted).sum())}
        entropies = None
        if run.job.with_entropies and not run.job.backward:
            entropies = outputs["entropies"].cpu().numpy()
        run.record(logps.cpu().numpy(), float(found.loss), metrics, entropies, work=found.work)

    @torch.no_grad()
    def _evaluate(self, index: int, logps: torch.Tensor) -> Evaluation:
        return self._run.loss.evaluate(logps, self._inputs(index))

    def _counts(self) -> bool:
        return any(self._run.loss.counted(self._inputs(index)) is not None for part in self._parts for index in part)

    def _sequences(self, part: MicroBatch) -> Sequences:
        tokens = tuple(torch.from_numpy(self._datum(index).tokens.astype(np.int64)) for index in part)
        return Sequences(tuple(each.to(self._device) for each in tokens), tuple(self._targets(index) for index in part))

    def _targets(self, index: int) -> torch.Tensor:
        targets = np.array(self._datum(index).inputs["target_tokens"], dtype=np.int64)
        return torch.from_numpy(targets).to(self._device)

    def _inputs(self, index: int) -> dict[str, Any]:
        put = partial(send, dtype=torch.float32, device=self._device)
        return dict(self._run.loss.tensors(self._datum(index).inputs, put))

    def _datum(self, index: int) -> Datum:
        return self._run.job.data[index]


def _num_targets(datum: Datum) -> tuple[int, ...]:
    return np.asarray(datum.inputs["target_tokens"]).shape[1:]
