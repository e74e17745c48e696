"""Some datums of one job, padded side by side, through a model whose every parameter has a gradient.

Shapes: B datums, T tokens of the longest, N tokens of one, K targets a token, V vocabulary.
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
        total = logits_BTV.new_zeros(())
        for place, index in enumerate(self._part):
            if self._run.failure is not None:
                return
            num_tokens = self._datum(index).tokens.size
            total = total + self._judge(index, logits_BTV[place, :num_tokens])
        self._run.judge_work()
        if self._run.job.backward and self._run.failure is None:
            total.backward()

    def _logits(self) -> torch.Tensor:
        rows = [torch.from_numpy(self._datum(index).tokens.astype(np.int64)) for index in self._part]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        sizes_B1 = torch.tensor([[len(row)] for row in rows], device=self._device)
        mask_BT = torch.arange(tokens_BT.shape[1], device=self._device) < sizes_B1
        # Of rows that are all of one length nothing is masked, which is the quicker way through attention.
        masked = {} if bool(mask_BT.all()) else {"attention_mask": mask_BT.long()}
        is_half = self._compute_dtype != torch.float32
        with torch.autocast(self._device.type, self._compute_dtype, enabled=is_half):
            logits_BTV: torch.Tensor = self._model(input_ids=tokens_BT, use_cache=False, **masked).logits
        return logits_BTV.float()

    def _judge(self, index: int, logits_NV: torch.Tensor) -> torch.Tensor:
        """Record the outcome of a datum; what to differentiate of it."""
        run, work = self._run, self._run.work
        datum = self._datum(index)
        targets = torch.from_numpy(np.array(datum.inputs["target_tokens"], dtype=np.int64)).to(self._device)
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
            return logprobs.new_zeros(())
        except UserError as error:
            run.fail(UserError(f"data[{index}]: {error.message}"))
            return logprobs.new_zeros(())
        if work is not None:
            work.spent += found.work
        metrics = found.metrics
        counted_N = run.loss.counted(inputs)
        if counted_N is not None:
            is_right_N = logits_NV.detach().argmax(dim=-1) == targets_NK[:, 0]
            metrics = {**metrics, CORRECT_TOKENS: float((is_right_N & counted_N).sum())}
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1) if run.job.with_entropies else None
        run.record(
            logprobs.detach().cpu().numpy(),
            float(found.loss),
            metrics,
            None if entropies_N is None or run.job.backward else entropies_N.cpu().numpy(),
            work=found.work,
        )
        carrier = (logprobs * found.d_logprobs).sum()
        if entropies_N is not None and run.job.backward:
            weights_N = torch.from_numpy(np.array(datum.inputs[ENTROPY_WEIGHTS], dtype=np.float32))
            carrier = carrier - (entropies_N * weights_N.to(self._device)).sum()
        return carrier

    def _datum(self, index: int) -> Datum:
        return self._run.job.data[index]
