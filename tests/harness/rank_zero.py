"""A mesh of several ranks that trains for ever, in a process of its own: ``-m harness.rank_zero SETTINGS`` (JSON).

It prints where its other ranks are, then ``in the middle`` when it is. The setting ``raises_on`` names a rank that then
fails with an order with which the others wait for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from torch import distributed

import harness.rank_zero  # by its name: the other ranks know no __main__ of this kind
from twinkle.core.adapter import AdapterConfig
from twinkle.core.process.logs import configure_logging
from twinkle.core.settings import Settings
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.process import build_engine
from twinkle.workers.ranks.commands import Command, Member

_MIDDLE = 5
_NO_RANK = -1
_TESTS = Path(__file__).parents[1]


class RankZero:
    """That process, and the ranks that follow it."""

    def __init__(self, model: Path, **settings: object) -> None:
        told = json.dumps({"model": str(model), "model_name": "tiny", **settings})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.rank_zero", told],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])},
        )
        self._told: tuple[list[psutil.Process], list[str]] | None = None

    @property
    def ranks(self) -> list[psutil.Process]:
        """Those that it leads, as soon as the mesh is in the middle of its work."""
        return self._read()[0]

    @property
    def hosts(self) -> list[str]:
        """Where all of them are, of ranks on a cluster."""
        return self._read()[1]

    def ended(self, timeout_s: float) -> tuple[int, str]:
        """Its exit status and what it said, as soon as it has ended."""
        _, said = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, said

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()

    def _read(self) -> tuple[list[psutil.Process], list[str]]:
        if self._told is None:
            assert self.process.stdout is not None
            lines: Iterator[str] = iter(self.process.stdout.readline, "")
            words = next((line for line in lines if line.startswith("{")), None)
            assert words is not None, self.process.communicate()[1]
            told = json.loads(words)
            self._told = [psutil.Process(pid) for pid in told["pids"]], told["hosts"]
            assert any("in the middle" in line for line in lines), self.process.communicate()[1]
        return self._told


@dataclass(frozen=True)
class FailOnOne(Command):
    """Meet the others, but for one rank, which fails instead."""

    rank: int

    def run(self, member: Member) -> None:
        """Wait for as long as ranks wait for each other."""
        if distributed.get_rank() == self.rank:
            raise RuntimeError(f"of rank {self.rank} alone")
        distributed.barrier()


def _train(settings: Settings, *, raises_on: int) -> None:
    engine = build_engine(settings)
    hosts = [place.host for place in engine._world.places] if str(settings.ranks).startswith("ray") else []
    print(json.dumps({"pids": list(engine.follower_pids), "hosts": hosts}), flush=True)
    adapter = engine.create(AdapterConfig(base_model="tiny", rank=4, seed=0))
    tokens = np.arange(40)
    datum = WireDatum(tokens, {"target_tokens": tokens, "weights": np.ones(40, dtype=np.float32)})
    body = ForwardBackwardBody("adapter", 0, False, "cross_entropy", {}, (datum,) * 4)
    num_steps = 0
    while True:
        [answer] = engine.run_passes([Pass(state=adapter, body=body)])
        if isinstance(answer, Exception):
            sys.exit(f"an operation took the blame: {answer}")
        engine.optim_step(adapter, AdamParams(learning_rate=1e-3))
        num_steps += 1
        if num_steps == _MIDDLE:
            print("in the middle", flush=True)
            if raises_on != _NO_RANK:
                engine._together(harness.rank_zero.FailOnOne(raises_on))


if __name__ == "__main__":
    configure_logging("INFO", json=False)
    told = json.loads(sys.argv[1])
    raises_on = told.pop("raises_on", _NO_RANK)
    _train(Settings(**told), raises_on=raises_on)
