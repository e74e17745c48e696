"""The local training loop runs, learns and saves, on both models."""

import os
import re
from pathlib import Path

import pytest

from harness.preloaded import run_preloaded

EXAMPLE = Path(__file__).parents[3] / "examples" / "local_training.py"


@pytest.mark.parametrize("arguments", [["--tenants", "2"], ["--plain"]], ids=["two tenants", "plain"])
def test_the_local_loop_learns_and_saves(arguments: list[str], tmp_path: Path) -> None:
    code, said = run_preloaded(
        EXAMPLE,
        {**os.environ, "OMP_NUM_THREADS": "1"},
        folder=tmp_path,
        arguments=["--steps", "40", "--output", str(tmp_path), *arguments],
        timeout_s=150,
    )

    assert code == 0, said
    losses = [float(value) for value in re.findall(r"tenant-0: \{'loss': '([0-9.]+)'", said)]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0]
    assert (tmp_path / "checkpoints" / "tenant-0" / "optimizer.safetensors").is_file()
