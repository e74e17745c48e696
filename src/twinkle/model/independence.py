"""Start-up check on the real model: does fusing two jobs leave their bits alone?

The products of a model may have independent rows and an architecture still mix them, say by an activation of its own.
What cannot be shown here is not promised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from twinkle.model.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig, LoraPool

LENGTHS = (9, 4)
RANK = 4

RunJobs = Callable[[Sequence[TrainJob]], list[TrainOutcome | Exception]]


def fusing_keeps_bits(pool: LoraPool, run: RunJobs, vocab_size: int) -> bool:
    """Whether two small jobs give the same logprobs and gradients fused and alone."""
    alone = [_result(pool, run, [number], vocab_size)[0] for number in range(len(LENGTHS))]
    return _result(pool, run, range(len(LENGTHS)), vocab_size) == alone


def _result(pool: LoraPool, run: RunJobs, numbers: Sequence[int], vocab_size: int) -> list[tuple[bytes, bytes]]:
    jobs = [_job(pool, number, vocab_size) for number in numbers]
    outcomes = run(jobs)
    results: list[tuple[bytes, bytes]] = []
    for job, outcome in zip(jobs, outcomes, strict=True):
        if isinstance(outcome, Exception):
            raise outcome
        results.append((outcome.logprobs[0].tobytes(), job.adapter.grad.cpu().numpy().tobytes()))
    return results


def _job(pool: LoraPool, number: int, vocab_size: int) -> TrainJob:
    adapter = pool.create(LoraConfig(rank=RANK, seed=number))
    noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(number))
    adapter.params.add_(noise.to(adapter.params.device), alpha=0.02)
    adapter.publish()
    rng = np.random.default_rng(number)
    length = LENGTHS[number]
    inputs: dict[str, np.ndarray] = {
        "target_tokens": rng.integers(0, vocab_size, length),
        "weights": np.ones(length, dtype=np.float32),
    }
    return TrainJob(adapter, (Datum(rng.integers(0, vocab_size, length), inputs),), "cross_entropy")
