"""Jobs fused and alone where products are tiled: ``python -m harness.tiled_run <family>``, results in JSON.

A process of its own, since MKL's mode is fixed by the first product. Run with ``MKL_CBWR=AUTO``.
"""

import hashlib
import json
import sys
from collections.abc import Sequence

import numpy as np
import torch
import transformers

from harness.families import FAMILIES, VOCAB_SIZE
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraConfig

CONFIGS = (LoraConfig(rank=8, seed=1), LoraConfig(rank=3, seed=2, train_mlp=False), LoraConfig(rank=1, seed=3))
LENGTHS = ((70, 1, 5), (3, 64), (130,))
SICK = LoraConfig(rank=5, seed=4)


def make_model(family: str) -> FusedLoraModel:
    """The model of a family, the same in every process."""
    torch.manual_seed(7)
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return FusedLoraModel(model, name=family)


def make_job(model: FusedLoraModel, number: int) -> TrainJob:
    """The job of one tenant."""
    rng = np.random.default_rng(number)
    adapter = model.create_adapter(CONFIGS[number])
    adapter.params.copy_(torch.from_numpy(rng.normal(0, 0.05, adapter.params.numel())))
    return TrainJob(adapter, tuple(make_datum(rng, length) for length in LENGTHS[number]), "cross_entropy")


def make_datum(rng: np.random.Generator, length: int) -> Datum:
    """Random tokens and targets."""
    inputs = {"target_tokens": rng.integers(0, VOCAB_SIZE, length), "weights": np.ones(length, dtype=np.float32)}
    return Datum(rng.integers(0, VOCAB_SIZE, length), inputs)


def make_sick_job(model: FusedLoraModel) -> TrainJob:
    """The job of a tenant whose weights are NaN."""
    adapter = model.create_adapter(SICK)
    adapter.params.fill_(float("nan"))
    return TrainJob(adapter, (make_datum(np.random.default_rng(9), 20),), "cross_entropy")


def run(model: FusedLoraModel, jobs: Sequence[TrainJob]) -> list[dict[str, object]]:
    """Each job's digest, logprobs and size of its gradient, or its error."""
    results: list[dict[str, object]] = []
    for job, outcome in zip(jobs, model.forward_backward(jobs), strict=True):
        if isinstance(outcome, Exception):
            results.append({"error": str(outcome)})
            continue
        logprobs = np.concatenate(outcome.logprobs)
        bits = logprobs.tobytes() + job.adapter.grad.numpy().tobytes()
        results.append(
            {
                "digest": hashlib.sha256(bits).hexdigest(),
                "logprobs": logprobs.tolist(),
                "gradient": job.adapter.grad.tolist(),
            }
        )
    return results


def main(family: str) -> None:
    """Print the mode, each job alone, and all of them fused behind a sick one."""
    torch.set_num_threads(1)
    model = make_model(family)
    numbers = range(len(CONFIGS))
    alone = [run(model, [make_job(model, number)])[0] for number in numbers]
    sick, *fused = run(model, [make_sick_job(model), *(make_job(model, number) for number in numbers)])
    json.dump({"determinism": model.determinism, "alone": alone, "fused": fused, "sick": sick}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
