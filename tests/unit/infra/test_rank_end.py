"""A rank that dies ends the others, which say why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import os, signal, threading, time
import torch
import transformers
import twinkle
from torch import distributed

mesh = twinkle.DeviceMesh.from_sizes(dp_size=3, device_type="cpu")
twinkle.initialize("local", name="night", global_device_mesh=mesh)
twinkle.get_logger().info("said once")
transformers.utils.logging.get_logger("transformers.models").warning("a library's remark")
distributed.barrier()
print("died at", time.time(), flush=True)
rank = distributed.get_rank()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    threading.Event().wait(300)
distributed.all_reduce(torch.ones(1))
"""


def test_a_dead_rank_ends_the_others_within_seconds_and_each_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", str(script)]

    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=120
    )
    ended = time.time()

    assert done.returncode != 0
    # Ranks write to one stream: what another says may stand right behind.
    found = re.search(r"died at (\d+\.\d+)", done.stdout)
    assert found is not None, done.stdout
    died = float(found[1])
    assert ended - died < 20
    assert done.stderr.count("said once") == done.stderr.count("a library's remark") == 1
    # Whichever comes first: its connection breaks, or the launcher stops it.
    assert "rank 0 of 3 of night ends: " in done.stderr
    assert "rank 1 of 3 of night ends: the launcher stopped it, as it does when another rank has failed" in done.stderr
