"""What engines share in which a pass is one job's: the jobs of a batch, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from twinkle.core.errors import InvalidInput
from twinkle.core.slices import Slices, finished
from twinkle.loss import DatumLoss
from twinkle.model.fused.batch_jobs import Work, run_with_batches
from twinkle.model.fused.job_run import JobRun, commit_all, start_runs
from twinkle.model.fused.model_info import ModelInfo
from twinkle.model.fused.training import TrainJob, TrainOutcome
from twinkle.model.fused.validation import validate_batch, validate_job

UNFUSED = "unfused"
"""No operation shares a pass with another; one that is done again on the same ranks gives the same bits."""


class OneByOne(ABC):
    """The jobs of :mod:`twinkle.model.fused.training`; a subclass makes the passes of one."""

    info: ModelInfo
    without_embeddings: ClassVar[str]
    """Who compares no embeddings, and what to do instead: ``... has not; use ...``."""

    @abstractmethod
    def _run_job(self, run: JobRun) -> Slices[None]:
        """Make its passes, and have the run record what they find or why it fails."""

    @property
    def embedding(self) -> NoReturn:
        """Refused: what compares embeddings runs in another engine."""
        raise InvalidInput("task", f"is 'embedding', which {self.without_embeddings}")

    def forward_backward(self, jobs: Sequence[Work]) -> list[TrainOutcome | Exception]:
        """Run jobs; one result each, in their order. One that fails leaves what it trains as it was."""
        return finished(self.passes(jobs))

    def passes(self, jobs: Sequence[Work]) -> Slices[list[TrainOutcome | Exception]]:
        """The same, a part at a time. Between two others may be run, of others than these train."""
        return run_with_batches(jobs, self._run_jobs, self._judge_batch, self._refuse_embedded)

    def _run_jobs(self, jobs: Sequence[TrainJob]) -> Slices[list[TrainOutcome | Exception]]:
        runs = start_runs(jobs, [self._loss_or_refusal(job) for job in jobs])
        is_begun = False
        for run in runs:
            if not isinstance(run, JobRun):
                continue
            if is_begun:
                yield
            is_begun = True
            yield from self._run_job(run)
        return commit_all(runs)

    def _loss_or_refusal(self, job: TrainJob) -> DatumLoss | Exception:
        try:
            return validate_job(job, vocab_size=self.info.vocab_size, max_context_length=self.info.max_context_length)
        except InvalidInput as error:
            return error

    def _judge_batch(self, job: TrainJob) -> None:
        validate_batch(job, vocab_size=self.info.vocab_size, max_context_length=self.info.max_context_length)

    def _refuse_embedded(self, job: TrainJob) -> Slices[TrainOutcome | Exception]:
        yield from ()
        return InvalidInput("loss_fn", f"{job.loss} compares embeddings, which {self.without_embeddings}")
