"""Runs a script in a process of its own and an empty folder, and reads what it tells.

As its reader would, by a fresh interpreter or by torchrun, where a test asks for that; else by processes that are
forked from one that has the libraries (`harness.preloaded`).
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.preloaded import run_preloaded
from twinkle.infra.network import find_free_port

TIME_LIMIT_S = 240
WATCHER = Path(__file__).with_name("watched_script.py")
TESTS = Path(__file__).resolve().parents[1]
_PROGRESS = re.compile(r"Current is step (\d+) of (\d+), metric: (\{.*?\})", re.DOTALL)


@dataclass(frozen=True)
class Told:
    """A line of progress that a script wrote: step, number of steps, and the metrics."""

    step: int
    steps: int
    metrics: dict[str, Any]

    @property
    def loss(self) -> float:
        return float(self.metrics["loss"])


@dataclass(frozen=True)
class Run:
    """A script that has ended well."""

    folder: Path
    """Its working directory."""
    output: str
    """What it printed and logged."""

    @property
    def progress(self) -> list[Told]:
        """Every line of progress once: only one rank tells."""
        return [
            Told(int(step), int(steps), ast.literal_eval(metrics))
            for step, steps, metrics in _PROGRESS.findall(self.output)
        ]


def run_script(
    text: str,
    folder: Path,
    environment: Mapping[str, str],
    *,
    ranks: int = 0,
    is_fresh: bool = False,
    arguments: tuple[str, ...] = (),
    time_limit_s: float = TIME_LIMIT_S,
) -> Run:
    """Write the text to ``train.py``, run that, and expect that it ends well.

    Args:
        text: Of the script.
        folder: Made if need be; the working directory.
        environment: What is set beyond what this process has.
        ranks: Processes that torchrun starts; without it, one. Each rank then leaves what it holds of the weights
            at every save (`harness.watched_script`).
        is_fresh: By an interpreter that has imported nothing, as ranks always are.
        arguments: Of the script.
        time_limit_s: After which it is ended.

    Raises:
        AssertionError: It did not end well; with the last of what it told.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(text)
    # Tiny models are quickest on one thread, and ranks and other tests want the cores as well.
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    whole = {**os.environ, **threads, **environment, "PYTHONPATH": path}
    script, given = (WATCHER, ("train.py", *arguments)) if ranks else (folder / "train.py", arguments)
    if is_fresh or ranks:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={find_free_port()}"]
        code, output = _run_fresh([*(launcher if ranks else []), str(script), *given], whole, folder, time_limit_s)
    else:
        code, output = run_preloaded(script, whole, folder=folder, arguments=given, timeout_s=time_limit_s)
    assert code == 0, f"the script ended with {code}:\n{output[-6000:]}"
    return Run(folder, output)


def _run_fresh(
    command: list[str], environment: Mapping[str, str], folder: Path, time_limit_s: float
) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=time_limit_s,
        check=False,
    )
    return run.returncode, run.stdout


def assert_ranks_hold_the_same(run: Run, ranks: int) -> None:
    """Of a run of several ranks: at its last save every rank held the same weights."""
    held = [json.loads((run.folder / f"weights-{rank}.json").read_text()) for rank in range(ranks)]
    assert held[0], "no rank holds anything"
    assert all(weights == held[0] for weights in held)
