"""Two ranks by NCCL, each with a GPU of its own; the CPU's twin of the same script goes by gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_ranks_script.py")
LOSS_ERROR = 0.02
"""Relative. Ranks add up their shares in another order, in bfloat16."""


@pytest.mark.parametrize(
    "kind",
    [
        # Two processes that import everything, for the sake of the script alone: what it checks, others check sooner.
        pytest.param("cpu", marks=pytest.mark.soak),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.timeout(300)
def test_two_ranks_train_what_one_trains(kind: str, base_folder: Path) -> None:
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, and there is {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, base_folder, kind],
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        said = [rank.communicate(timeout=250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    ours, theirs = (json.loads(out.splitlines()[-1]) for out, _ in said)

    assert ours["shared"] == theirs["shared"]
    assert ours["sharded"] == theirs["sharded"]
    for way in ("shared", "sharded"):
        assert ours[way][0] == pytest.approx(ours["alone"], rel=LOSS_ERROR)
    assert ours["library"] == theirs["library"]
    assert ours["library"][-1] < ours["library"][0]
