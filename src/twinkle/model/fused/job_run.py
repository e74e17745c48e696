"""One job while its call runs: how far it is, where its gradient gathers, how it ended.

On several ranks each computes its share of every job; ``settle`` brings the shares together.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from twinkle.core.errors import OutOfMemory, UserError
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.loss import DatumLoss, TracedLoss
from twinkle.loss.operation_work import OperationWork
from twinkle.model.fused.gradient_buffers import is_out_of_memory
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.adapter import LoraPair, PairsOnDemand

ZerosLike = Callable[[torch.Tensor], torch.Tensor]

FIRST_EXPECTED_WORK = 1 << 20
"""Of a client's own loss for one datum, before any is known; it may be four times as much."""


def shares_of(data: Sequence[Datum], num_ranks: int) -> list[range]:
    """The datums of each rank: stretches of about as many tokens each, some of them empty.

    A function of the job alone, so that neither company nor replay changes a sum. Which rank has the first stretch is
    drawn from the tokens: small jobs would otherwise all be the same rank's.
    """
    if num_ranks == 1:
        return [range(len(data))]
    sizes = np.array([datum.tokens.size for datum in data], dtype=np.int64)
    middles = 2 * np.cumsum(sizes) - sizes
    # Monotone, since the middles are: the middle of a datum says in which stretch of the tokens it lies.
    stretch_of_datum = middles * num_ranks // max(2 * int(sizes.sum()), 1)
    starts = np.searchsorted(stretch_of_datum, np.arange(num_ranks + 1)).tolist()
    first_rank = zlib.crc32(data[0].tokens.astype(np.int64).tobytes()) % num_ranks
    stretches = [range(start, end) for start, end in itertools.pairwise(starts)]
    return [stretches[(rank - first_rank) % num_ranks] for rank in range(num_ranks)]


@dataclass(frozen=True)
class FailureReport:
    """An error in a form that survives the way to another process, whatever its class."""

    kind: Literal["user", "out_of_memory", "other"]
    message: str

    @classmethod
    def of(cls, error: Exception) -> FailureReport:
        """What there is to say about an error."""
        if isinstance(error, UserError):
            return cls("user", error.message)
        if isinstance(error, OutOfMemory):
            return cls("out_of_memory", error.message)
        return cls("other", f"{type(error).__name__}: {error}")

    def to_error(self) -> Exception:
        """The error again."""
        if self.kind == "user":
            return UserError(self.message)
        return OutOfMemory(self.message) if self.kind == "out_of_memory" else RuntimeError(self.message)


@dataclass(frozen=True, eq=False)
class ShareReport:
    """How one rank's share of a job ended: logprobs, losses and metrics of its datums, or why not."""

    failure: FailureReport | None
    logprobs: tuple[np.ndarray, ...]
    entropies: tuple[np.ndarray, ...]
    losses: tuple[float, ...]
    metrics: tuple[Mapping[str, float], ...]
    work: int = 0


class JobRun:
    """The state of one job of a fused call.

    A job's gradient is ``d1 + d2 + ...`` in datum order, added to what the adapter's window held before: gathered in
    the adapter's own buffer when the window is empty (``in_place``), else in a scratch buffer. Nothing the adapter held
    is touched before ``commit``, so a job that fails leaves no trace.
    """

    def __init__(
        self,
        job: TrainJob,
        loss: DatumLoss,
        *,
        in_place: bool,
        ranks: RankGroup = ALONE,
        zeros_like: ZerosLike = torch.zeros_like,
    ) -> None:
        self.job = job
        self.loss = loss
        self.shares = shares_of(job.data, ranks.size)
        self.share = self.shares[ranks.rank]
        self.next_datum = self.share.start
        self.alone = False
        self.failure: Exception | None = None
        self.work = _work_of(job) if isinstance(loss, TracedLoss) else None
        self._most_work = 0
        self._in_place = in_place
        self._is_whole = False
        self._logprobs: list[np.ndarray] = []
        self._entropies: list[np.ndarray] = []
        self._losses: list[float] = []
        self._metrics: list[Mapping[str, float]] = []
        self._sum: torch.Tensor | None = None
        self.gradient: Mapping[str, LoraPair] | None = None
        if job.backward and in_place:
            self._sum, self.gradient = job.adapter.grad, job.adapter.grad_views
        elif job.backward:
            self._gather_apart(zeros_like)

    def _gather_apart(self, zeros_like: ZerosLike) -> None:
        try:
            self._sum = zeros_like(self.job.adapter.grad)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Said to the other ranks like any failure.
            self.fail(OutOfMemory(f"the device ran out of memory: {error}"))
            return
        self.gradient = PairsOnDemand(self.job.adapter.layout, self._sum)

    @property
    def sum(self) -> torch.Tensor | None:
        """The buffer that ``gradient`` views, where the gradient gathers; None of a job without a backward pass."""
        return self._sum

    @property
    def pending(self) -> bool:
        """Whether there are datums of this rank's share left to run."""
        return self.failure is None and self.next_datum < self.share.stop

    @property
    def expected_work(self) -> int:
        """What the loss of a datum may take, as far as those before it tell; 0 where it is nothing to speak of."""
        if self.work is None:
            return 0
        return self._most_work or FIRST_EXPECTED_WORK

    def record(
        self,
        logprobs: np.ndarray,
        loss: float,
        metrics: Mapping[str, float],
        entropies: np.ndarray | None = None,
        *,
        work: int = 0,
    ) -> None:
        """Take the outcome of the next datum."""
        self._most_work = max(self._most_work, work)
        self._logprobs.append(logprobs)
        if entropies is not None:
            self._entropies.append(entropies)
        self._losses.append(loss)
        self._metrics.append(metrics)
        if not (np.isfinite(loss) and np.isfinite(logprobs).all()):
            self.fail(
                UserError(
                    f"the loss is not finite in data[{self.next_datum}] (loss {loss}); nothing of this operation was "
                    "applied. Check its inputs, or load an earlier checkpoint if the adapter has diverged"
                )
            )
        self.next_datum += 1

    def restart(self) -> None:
        """Forget everything gathered so far and begin again with the first datum of the share."""
        self.next_datum = self.share.start
        self._logprobs.clear()
        self._entropies.clear()
        self._losses.clear()
        self._metrics.clear()
        if self._sum is not None:
            self._sum.zero_()
        if self.work is not None:
            self.work.spent = 0

    def fail(self, failure: Exception) -> None:
        """End this job; its datums take no part in later passes."""
        if self.failure is None:
            self.failure = failure

    def report(self) -> ShareReport:
        """How this rank's share ended, for the other ranks."""
        failure = None if self.failure is None else FailureReport.of(self.failure)
        return ShareReport(
            failure=failure,
            logprobs=tuple(self._logprobs),
            entropies=tuple(self._entropies),
            losses=tuple(self._losses),
            metrics=tuple(self._metrics),
            work=0 if self.work is None else self.work.spent,
        )

    def take_reports(self, reports: Sequence[ShareReport]) -> None:
        """Take in how every rank's share ended, by rank; the failure of the earliest datums is the job's."""
        in_order = [reports[rank] for rank in sorted(range(len(reports)), key=lambda rank: self.shares[rank].start)]
        failures = [report.failure for report in in_order if report.failure is not None]
        self.failure = failures[0].to_error() if failures else None
        self.judge_work(sum(report.work for report in reports))
        self._logprobs = [logprobs for report in in_order for logprobs in report.logprobs]
        self._entropies = [entropies for report in in_order for entropies in report.entropies]
        self._losses = [loss for report in in_order for loss in report.losses]
        self._metrics = [metrics for report in in_order for metrics in report.metrics]

    def judge_work(self, spent: int | None = None) -> None:
        """End this job if its loss has taken too much: on this rank, or so much on all of them."""
        if self.work is None:
            return
        refusal = self.work.refusal(self.work.spent if spent is None else spent)
        if refusal is not None:
            self.fail(refusal)

    def add_up(self, ranks: RankGroup) -> None:
        """Add the gradients of all shares; a job that failed has none."""
        if self.failure is None and self._sum is not None:
            ranks.sum_(self._sum)

    def window(self) -> torch.Tensor | None:
        """What the adapter's window will hold if this is committed; None if all is not well. Before a second one of an
        adapter the first must be committed.
        """
        if self.failure is not None or self._sum is None:
            return None
        if not (self._in_place or self._is_whole):
            self._sum.add_(self.job.adapter.grad)
        self._is_whole = True
        return self._sum

    def commit(self, *, is_finite: bool | None = None) -> TrainOutcome | Exception:
        """Add the gathered gradient to the adapter's window, or drop it; return the outcome.

        ``is_finite`` is what is known already of ``window``.
        """
        window = self.window()
        if window is not None:
            self._commit_gradient(window, is_finite)
        if self.failure is not None:
            if self._in_place and self._sum is not None:
                self._sum.zero_()
            return self.failure
        num_tokens = sum(datum.tokens.size for datum in self.job.data)
        loss = float(sum(self._losses))
        metrics = {"loss:sum": loss, "num_tokens:sum": float(num_tokens), **_add_up(self._metrics)}
        return TrainOutcome(
            logprobs=self._logprobs, loss=loss, num_tokens=num_tokens, metrics=metrics, entropies=self._entropies
        )

    def _commit_gradient(self, total: torch.Tensor, is_finite: bool | None) -> None:
        adapter = self.job.adapter
        if not (all_finite([total])[0] if is_finite is None else is_finite):
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


def _work_of(job: TrainJob) -> OperationWork:
    if job.is_again:
        return OperationWork(None)
    return OperationWork.of(num_datums=len(job.data), num_tokens=sum(datum.tokens.size for datum in job.data))


def start_runs(
    jobs: Sequence[TrainJob],
    losses: Sequence[DatumLoss | Exception],
    ranks: RankGroup = ALONE,
    *,
    zeros_like: ZerosLike = torch.zeros_like,
) -> list[JobRun | Exception]:
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
        runs.append(JobRun(job, loss, in_place=in_place, ranks=ranks, zeros_like=zeros_like))
    return runs


def settle(runs: Sequence[JobRun], ranks: RankGroup) -> None:
    """Bring the shares of all ranks together, so that every rank goes on with the same outcomes and gradients."""
    if ranks.size == 1:
        return
    reports = ranks.gather([run.report() for run in runs])
    for number, run in enumerate(runs):
        run.take_reports([of_rank[number] for of_rank in reports])
    for run in runs:
        run.add_up(ranks)


def _add_up(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of datums as those of their job: each name's suffix says whether to add or to average."""
    totals: dict[str, float] = {}
    for of_datum in metrics:
        for name, value in of_datum.items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: total / len(metrics) if name.endswith(":mean") else total for name, total in totals.items()}


def commit_all(runs: Sequence[JobRun | Exception]) -> list[TrainOutcome | Exception]:
    """Commit each run that there is, one after the other; a device is asked once for the first of each adapter."""
    asked: dict[int, torch.Tensor] = {}
    begun: set[int] = set()
    for number, run in enumerate(runs):
        if isinstance(run, JobRun) and run.sum is not None and id(run.job.adapter) not in begun:
            begun.add(id(run.job.adapter))
            window = run.window()
            if window is not None:
                asked[number] = window
    known = dict(zip(asked, all_finite(list(asked.values())), strict=True))
    return [
        run.commit(is_finite=known.get(number)) if isinstance(run, JobRun) else run for number, run in enumerate(runs)
    ]


def all_finite(buffers: Sequence[torch.Tensor]) -> list[bool]:
    """Whether no entry of a buffer is NaN or infinite, without a temporary of its size."""
    if not buffers:
        return []
    return [
        bool(of_sum) or _is_finite(buffer)
        for of_sum, buffer in zip(sums_of(buffers).isfinite().tolist(), buffers, strict=True)
    ]


def sums_of(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number for each buffer that is finite only if all in it is: there is no cheaper one.

    Finite ones may overflow, though. An accelerator makes all of them with one call, of absolute values.
    """
    if buffers[0].device.type == "cpu":
        return torch.stack([buffer.sum() for buffer in buffers])
    return torch.stack(torch._foreach_norm(list(buffers), 1))


def _is_finite(buffer: torch.Tensor) -> bool:
    low, high = torch.aminmax(buffer)
    return bool(torch.isfinite(low) & torch.isfinite(high))
