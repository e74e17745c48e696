"""Start-up check on the real model with adapters: does fusing jobs leave each what it is alone?

The products of a model may have independent rows and an architecture still mix them, say by an activation of its own.
What cannot be shown here is not promised, and jobs that differ by more than rounding are not served at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from twinkle.core.errors import ConfigError, UserError
from twinkle.model.fused.probe import is_off
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig, LoraPool

LENGTHS = ((67, 9), (9,))
"""Of each job's datums; neighbours of one length are attended together."""
RANK = 4

RunJobs = Callable[[Sequence[TrainJob]], list[TrainOutcome | Exception]]


class Independence:
    """Small jobs of two tenants, run alone, fused, and fused with one whose weights are NaN.

    Args:
        pool: Makes the adapters.
        run: Runs jobs fused.
        vocab_size: Tokens are drawn from it.
        context: No datum is longer.
        kept_out: Tokens that are none of a text: they stand for pictures.
    """

    def __init__(
        self, pool: LoraPool, run: RunJobs, *, vocab_size: int, context: int, kept_out: Collection[int] = ()
    ) -> None:
        self._kept_out = list(kept_out)
        self._pool = pool
        self._run_jobs = run
        self._vocab_size = vocab_size
        self._context = context

    def keeps_bits(self, architecture: str, tolerance: float) -> bool:
        """Whether jobs give the same logprobs and gradients, to the bit, alone and in any company.

        Raises:
            ConfigError: They differ by more than ``tolerance``, as a share of them.
        """
        numbers = range(len(LENGTHS))
        alone = [self._results([number])[0] for number in numbers]
        keeps = True
        for sick in (None, 0):
            company = "another" if sick is None else "one whose weights are NaN"
            try:
                fused = self._results(numbers, sick=sick)
            except UserError as error:
                raise _mixed(architecture, company, f"a job fails: {error.message}") from None
            for number in numbers:
                if number == sick:
                    continue
                for name, found, expected in zip(("logprobs", "gradients"), fused[number], alone[number], strict=True):
                    keeps &= torch.equal(found, expected)
                    if off := is_off(found, expected, tolerance):
                        raise _mixed(architecture, company, f"the {name} of a job are {off} against the same alone")
        return keeps

    def _results(self, numbers: Sequence[int], sick: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        jobs = [self._job(number, is_sick=number == sick) for number in numbers]
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, job, outcome in zip(numbers, jobs, self._run_jobs(jobs), strict=True):
            if isinstance(outcome, TrainOutcome):
                results.append((torch.from_numpy(np.concatenate(outcome.logprobs)), job.adapter.grad))
            elif number == sick:
                results.append((torch.empty(0), job.adapter.grad))
            else:
                raise outcome
        return results

    def _job(self, number: int, *, is_sick: bool) -> TrainJob:
        adapter = self._pool.create(LoraConfig(rank=RANK, seed=number))
        noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(number))
        adapter.params.add_(noise.to(adapter.params.device), alpha=torch.nan if is_sick else 0.02)
        adapter.publish()
        rng = np.random.default_rng(number)
        data = tuple(self._datum(rng, min(length, self._context)) for length in LENGTHS[number])
        return TrainJob(adapter, data, "cross_entropy")

    def _datum(self, rng: np.random.Generator, length: int) -> Datum:
        inputs: dict[str, np.ndarray] = {
            "target_tokens": rng.integers(0, self._vocab_size, length),
            "weights": np.ones(length, dtype=np.float32),
        }
        tokens = rng.integers(0, self._vocab_size, length)
        return Datum(np.where(np.isin(tokens, self._kept_out), 0, tokens), inputs)


def _mixed(architecture: str, company: str, what: str) -> ConfigError:
    return ConfigError(
        f"{architecture} does not keep jobs apart: fused with {company}, {what}; this architecture is not supported"
    )
