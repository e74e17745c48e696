"""A mesh of several ranks that trains for ever, in a process of its own: ``-m harness.rank_zero SETTINGS`` (JSON).

It prints where its other ranks are, then ``in the middle`` when it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from twinkle.core.adapter import AdapterConfig
from twinkle.core.logs import configure_logging
from twinkle.core.settings import Settings
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.process import build_engine

_MIDDLE = 5
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


def _train(settings: Settings) -> None:
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


if __name__ == "__main__":
    configure_logging("INFO", json=False)
    _train(Settings(**json.loads(sys.argv[1])))
