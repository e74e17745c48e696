"""One of two ranks that share a batch and, then, the base model's layers; says on its last line what it came to.

MASTER_ADDR=... MASTER_PORT=... WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 python two_ranks_script.py MODEL DEVICE
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import distributed

from twinkle.checkpoint_engine.snapshot import fingerprint
from twinkle.infra import DeviceMesh, Platform
from twinkle.infra.process_group import join_world
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.model import TransformersModel
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import AdamParams, Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig

LENGTHS = (19, 33, 7, 50, 21, 12)
STEPS = 3


def fused_steps(model_dir: str, device: str, ranks: RankGroup, *, shard: bool) -> tuple[list[float], str]:
    """Losses of some steps of one adapter, and the adapter's fingerprint after them."""
    model = FusedLoraModel.from_pretrained(model_dir, device=device, dtype=torch.bfloat16, ranks=ranks, shard=shard)
    adapter = model.create_adapter(LoraConfig(rank=8, seed=1))
    rng = np.random.default_rng(0)
    data = []
    for length in LENGTHS:
        tokens = rng.integers(3, 300, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        data.append(Datum(tokens=tokens[:-1], inputs=inputs))
    losses = []
    for _ in range(STEPS):
        (outcome,) = model.forward_backward([TrainJob(adapter, tuple(data), "cross_entropy")])
        assert isinstance(outcome, TrainOutcome), outcome
        losses.append(outcome.loss)
        model.optim_step(adapter, AdamParams(learning_rate=5e-3))
    return losses, fingerprint(adapter)


def library_losses(model_dir: str) -> list[float]:
    """Losses of steps on all of a model's parameters, spread over both ranks."""
    model = TransformersModel(model_dir, device_mesh=DeviceMesh.from_sizes(fsdp_size=2), gradient_checkpointing=False)
    model.set_optimizer("AdamW", lr=1e-3)
    first = 3 + 50 * distributed.get_rank()
    rows = [{"input_ids": list(range(first, first + 12)), "labels": list(range(first + 1, first + 13))}]
    losses = []
    for _ in range(STEPS):
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()
        losses.append(model.calculate_metric(is_training=True)["loss"])
    return [float(loss) for loss in losses]


def main() -> None:
    """As one rank."""
    model_dir, kind = sys.argv[1:]
    prepare_environment()
    torch.set_num_threads(1)
    platform = Platform.named(kind)
    join_world(platform, timeout_s=120)
    ranks = RankGroup(rank=distributed.get_rank(), size=2)
    device = platform.device_of(ranks.rank)
    alone, _ = fused_steps(model_dir, device, ALONE, shard=False)
    found = {
        "alone": alone,
        "shared": fused_steps(model_dir, device, ranks, shard=False),
        "sharded": fused_steps(model_dir, device, ranks, shard=True),
        "library": library_losses(model_dir),
    }
    distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
