"""Some datums of one job, padded side by side, through a model whose every parameter has a gradient.

Shapes: B datums, T tokens of the longest, N tokens of one, K targets a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from twinkle.core.batch_loss import CORRECT_TOKENS
from twinkle.core.errors import UserError
from twinkle.infra.sending import fetch, send
from twinkle.loss.datum import Evaluation
from twinkle.loss.operation_work import TooMuchWork
from twinkle.model.fused.job_run import JobRun
from twinkle.model.fused.training import ENTROPY_WEIGHTS, Datum


def parts_of(data: Sequence[Datum], *, tokens_per_pass: int) -> Iterator[range]:
    """A job's datums by what goes through the model at once: neighbours whose padded size is within the limit.

    How a job is cut depends on nothing but the job.
    """
    start, longest = 0, 0
    for index, datum in enumerate(data):
        longest = max(longest, datum.tokens.size)
        if index > start and longest * (index + 1 - start) > tokens_per_pass:
            yield range(start, index)
            start, longest = index, datum.tokens.size
    yield range(start, len(data))


@dataclass(frozen=True, eq=False)
class _Judged:
    """What a loss says of a datum: what is to be differentiated by it, and the rest as it is on the device."""

    found: Evaluation
    carrier: torch.Tensor
    logprobs: torch.Tensor
    entropies: torch.Tensor | None
    correct: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the host is told."""
        rest = [each for each in (self.entropies, self.correct) if each is not None]
        return [self.logprobs, self.found.loss, *rest]


class RowsPass:
    """One pass: logprobs and losses of its datums and, of a job with a backward pass, their gradient.

    Args:
        model: As transformers has it.
        run: The job, which takes the outcomes.
        part: The numbers of its datums.
        device: Of the model.
        compute_dtype: Of its products.
    """

    def __init__(self, model: Any, run: JobRun, part: range, device: torch.device, compute_dtype: torch.dtype) -> None:
        self._model = model
        self._run = run
        self._part = part
        self._device = device
        self._compute_dtype = compute_dtype

    def run(self) -> None:
        """Make it. A datum whose loss cannot be computed ends the job, of which then nothing is kept."""
        logits_BTV = self._logits()
        judged: list[_Judged] = []
        for place, index in enumerate(self._part):
            found = self._judge(index, logits_BTV[place, : self._datum(index).tokens.size])
            if found is None:
                return
            judged.append(found)
        self._record(judged)
        if self._run.job.backward and self._run.failure is None:
            torch.stack([each.carrier for each in judged]).sum().backward()

    def _logits(self) -> torch.Tensor:
        rows = [torch.from_numpy(self._datum(index).tokens.astype(np.int64)) for index in self._part]
        tokens_BT = send(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy(), torch.int64, self._device)
        sizes = [len(row) for row in rows]
        masked = {}
        if min(sizes) < max(sizes):
            # Of rows that are all of one length nothing is masked, which is the quicker way through attention.
            sizes_B = send(sizes, torch.int64, self._device)
            masked["attention_mask"] = (torch.arange(max(sizes), device=self._device) < sizes_B[:, None]).long()
        is_half = self._compute_dtype != torch.float32
        with torch.autocast(self._device.type, self._compute_dtype, enabled=is_half):
            logits_BTV: torch.Tensor = self._model(input_ids=tokens_BT, use_cache=False, **masked).logits
        return logits_BTV.float()

    def _judge(self, index: int, logits_NV: torch.Tensor) -> _Judged | None:
        """What is to be said of a datum, and differentiated; nothing where that has ended the job."""
        run, work = self._run, self._run.work
        datum = self._datum(index)
        targets = send(datum.inputs["target_tokens"], torch.int64, self._device)
        targets_NK = targets if targets.dim() == 2 else targets[:, None]
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        logprobs = logprobs_NV.gather(-1, targets_NK).view(targets.shape)
        inputs = run.loss.tensors(datum.inputs, partial(send, dtype=torch.float32, device=self._device))
        try:
            if work is not None and (refusal := work.refusal(work.spent)) is not None:
                raise refusal
            found = run.loss.evaluate(logprobs.detach(), inputs)
        except TooMuchWork as error:
            run.fail(error)
            return None
        except UserError as error:
            run.fail(UserError(f"data[{index}]: {error.message}"))
            return None
        if work is not None:
            work.spent += found.work
        counted_N = run.loss.counted(inputs)
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1) if run.job.with_entropies else None
        carrier = (logprobs * found.d_logprobs).sum()
        if entropies_N is not None and run.job.backward:
            weights_N = send(datum.inputs[ENTROPY_WEIGHTS], torch.float32, self._device)
            carrier = carrier - (entropies_N * weights_N).sum()
        return _Judged(
            found,
            carrier=carrier,
            logprobs=logprobs.detach(),
            entropies=None if run.job.backward else entropies_N,
            correct=None
            if counted_N is None
            else ((logits_NV.detach().argmax(dim=-1) == targets_NK[:, 0]) & counted_N).sum(),
        )

    def _record(self, judged: Sequence[_Judged]) -> None:
        """Take all of it to the host at once."""
        values = iter(fetch([tensor for each in judged for tensor in each.tensors]))
        for each in judged:
            logprobs, loss = next(values), float(next(values))
            entropies = None if each.entropies is None else next(values)
            metrics = each.found.metrics
            if each.correct is not None:
                metrics = {**metrics, CORRECT_TOKENS: float(next(values))}
            if self._run.failure is None:
                self._run.record(logprobs, loss, metrics, entropies, work=each.found.work)
        self._run.judge_work()

    def _datum(self, index: int) -> Datum:
        return self._run.job.data[index]
