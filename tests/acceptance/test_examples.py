"""The shipped examples that need a whole service do what they say."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic_rl.py"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_arithmetic_example_learns_from_rewards_alone(tmp_path: Path) -> None:
    arguments = ["--home", str(tmp_path / "home"), "--output", str(tmp_path), "--seeds", "3", "--steps", "80"]

    subprocess.run([sys.executable, str(EXAMPLE), *arguments], check=True, timeout=500)

    lines = (tmp_path / "arithmetic_rl.jsonl").read_text(encoding="utf-8").splitlines()
    settings, *rows = [json.loads(line) for line in lines]
    rewards = [row["reward"] for row in rows]
    # 256 answers a step: the mean of ten steps is off by 0.01. Where it was measured (examples/results) this seed went
    # from 0.19 to 0.41, and the slowest of three to 0.26.
    first, last = statistics.fmean(rewards[:10]), statistics.fmean(rewards[-10:])
    assert first < settings["chance"] + 0.05
    assert last > first + 0.1
    assert (tmp_path / "arithmetic_rl.png").is_file()
