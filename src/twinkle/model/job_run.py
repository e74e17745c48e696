"""One job while its call runs: how far it is, where its gradient gathers, how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from twinkle.core.errors import UserError
from twinkle.loss import DatumLoss
from twinkle.model.training import TrainJob, TrainOutcome
from twinkle.module.adapter import LoraPair


class JobRun:
    """The state of one job of a fused call.

    A job's gradient is ``d1 + d2 + ...`` in datum order, added to what the adapter's window held before: gathered in
    the adapter's own buffer when the window is empty (``in_place``), else in a scratch buffer. Nothing the adapter held
    is touched before ``commit``, so a job that fails leaves no trace.
    """

    def __init__(self, job: TrainJob, loss: DatumLoss, *, in_place: bool) -> None:
        self.job = job
        self.loss = loss
        self.next_datum = 0
        self.alone = False
        self.failure: Exception | None = None
        self._in_place = in_place
        self._logprobs: list[np.ndarray] = []
        self._losses: list[float] = []
        self._sum: torch.Tensor | None = None
        self.gradient: Mapping[str, LoraPair] | None = None
        if job.backward:
            self._sum = job.adapter.grad if in_place else torch.zeros_like(job.adapter.grad)
            self.gradient = job.adapter.grad_views if in_place else job.adapter.layout.views(self._sum)

    @property
    def pending(self) -> bool:
        """Whether there are datums left to run."""
        return self.failure is None and self.next_datum < len(self.job.data)

    def record(self, logprobs: np.ndarray, loss: float) -> None:
        """Take the outcome of the next datum."""
        self._logprobs.append(logprobs)
        self._losses.append(loss)
        if not (np.isfinite(loss) and np.isfinite(logprobs).all()):
            self.fail(
                UserError(
                    f"the loss is not finite in data[{self.next_datum}] (loss {loss}); nothing of this operation was "
                    "applied. Check its inputs, or load an earlier checkpoint if the adapter has diverged"
                )
            )
        self.next_datum += 1

    def restart(self) -> None:
        """Forget everything gathered so far and begin again with the first datum."""
        self.next_datum = 0
        self._logprobs.clear()
        self._losses.clear()
        if self._sum is not None:
            self._sum.zero_()

    def fail(self, failure: Exception) -> None:
        """End this job; its datums take no part in later passes."""
        if self.failure is None:
            self.failure = failure

    def commit(self) -> TrainOutcome | Exception:
        """Add the gathered gradient to the adapter's window, or drop it; return the outcome."""
        if self.failure is None and self._sum is not None:
            self._commit_gradient(self._sum)
        if self.failure is not None:
            if self._in_place and self._sum is not None:
                self._sum.zero_()
            return self.failure
        num_tokens = sum(datum.tokens.size for datum in self.job.data)
        loss = float(sum(self._losses))
        metrics = {"loss:sum": loss, "num_tokens:sum": float(num_tokens)}
        return TrainOutcome(logprobs=self._logprobs, loss=loss, num_tokens=num_tokens, metrics=metrics)

    def _commit_gradient(self, total: torch.Tensor) -> None:
        adapter = self.job.adapter
        if not self._in_place:
            total.add_(adapter.grad)
        if not all_finite(total):
            self.fail(
                UserError(
                    "the gradient is not finite; nothing of this operation was applied. Check its inputs for extreme "
                    "weights, advantages or logprobs"
                )
            )
            return
        if not self._in_place:
            adapter.grad.copy_(total)
        adapter.has_gradients = True


def start_runs(jobs: Sequence[TrainJob], losses: Sequence[DatumLoss | Exception]) -> list[JobRun | Exception]:
    """A run for each job that passed validation; the first of an adapter with an empty window gathers in place."""
    claimed: set[int] = set()
    runs: list[JobRun | Exception] = []
    for job, loss in zip(jobs, losses, strict=True):
        if isinstance(loss, Exception):
            runs.append(loss)
            continue
        in_place = job.backward and not job.adapter.has_gradients and id(job.adapter) not in claimed
        if job.backward:
            claimed.add(id(job.adapter))
        runs.append(JobRun(job, loss, in_place=in_place))
    return runs


def all_finite(buffer: torch.Tensor) -> bool:
    """Whether no entry is NaN or infinite, without a temporary of the buffer's size."""
    low, high = torch.aminmax(buffer)
    return bool(torch.isfinite(low) & torch.isfinite(high))
