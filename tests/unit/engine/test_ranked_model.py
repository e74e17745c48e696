"""Two processes, as torchrun starts them, with a sharded model: each reads its share of the layers alone, and what
fails on one leaves both in step."""

import json
import os
import socket
import subprocess
import sys

from safetensors import safe_open

RANK_CODE = """
import json, sys
import numpy as np
import torch
from torch import distributed
from transformers import core_model_loading
from transformers.distributed import sharding_utils
from twinkle.checkpoint_engine.snapshot import fingerprint
from twinkle.infra.platform import CPU
from twinkle.infra.process_group import join_world
from twinkle.infra.rank_group import RankGroup
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraConfig

num_bytes = 0
def counting(read):
    def read_and_count(*args, **options):
        global num_bytes
        tensor = read(*args, **options)
        num_bytes += 0 if tensor is None else tensor.nbytes
        return tensor
    return read_and_count

Shares = sharding_utils.DtensorShardOperation
Shares.shard_tensor = counting(Shares.shard_tensor)
core_model_loading._materialize_copy = counting(core_model_loading._materialize_copy)
prepare_environment()
torch.set_num_threads(1)
join_world(CPU, timeout_s=60)
ranks = RankGroup(rank=distributed.get_rank(), size=2)
model = FusedLoraModel.from_pretrained(sys.argv[1], tokens_per_pass=20, ranks=ranks, shard=True)
adapters = [model.create_adapter(LoraConfig(rank=4, seed=seed)) for seed in range(2)]
rng = np.random.default_rng(0)

def job(adapter, lengths):
    data = [rng.integers(0, 250, length) for length in lengths]
    inputs = [{"target_tokens": tokens, "weights": np.ones(tokens.size, dtype=np.float32)} for tokens in data]
    return TrainJob(adapter, tuple(map(Datum, data, inputs)), "cross_entropy")

def said(outcomes):
    return [str(one) if isinstance(one, Exception) else one.loss for one in outcomes]

run_head = model._head.run
def fail_for_the_first_adapter(hidden, targets, items, gradient):
    if ranks.rank == 1 and any(item.adapter is adapters[0] for item in items):
        raise ArithmeticError("this rank cannot")
    run_head(hidden, targets, items, gradient)

model._head.run = fail_for_the_first_adapter
both = model.forward_backward([job(adapter, [9, 12, 15, 6]) for adapter in adapters])
model._head.run = run_head
after = model.forward_backward([job(adapters[0], [9, 12, 15, 6])])
print(json.dumps([said(both), said(after), [fingerprint(adapter) for adapter in adapters], num_bytes]))
distributed.destroy_process_group()
"""


def bytes_of_a_rank(folder):
    """Of the tables all, of the layers half, and a little."""
    of_layers, of_tables = 0, 0
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.offset_keys():
            num_bytes = file.get_tensor(name).nbytes
            if ".layers." in name:
                of_layers += num_bytes
            else:
                of_tables += num_bytes
    return of_tables + 0.55 * of_layers


def test_a_pass_that_fails_on_one_rank_fails_its_job_on_all_and_nothing_else(base_dirs):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_CODE, str(base_dirs("qwen3"))],
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
        )
        for rank in "01"
    ]
    ours, theirs = (json.loads(rank.communicate(timeout=100)[0].splitlines()[-1]) for rank in ranks)

    # Halves of what has an odd number of rows.
    *ours, our_bytes = ours
    *theirs, their_bytes = theirs
    assert max(our_bytes, their_bytes) < bytes_of_a_rank(base_dirs("qwen3"))
    assert ours == theirs
    (failed, untouched), [later], fingerprints = ours
    assert failed == "ArithmeticError: this rank cannot"
    assert isinstance(untouched, float)
    assert isinstance(later, float)
    assert len(set(fingerprints)) == 2
