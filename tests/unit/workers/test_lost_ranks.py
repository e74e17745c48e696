"""A mesh that loses a rank in the middle of its work ends as a whole, soon, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.polling import wait_until
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.workers.process import build_engine
from twinkle.workers.ranks.world import EXIT_RANK_LOST

ENDS_S = 15.0
STUCK_AFTER_S = 20

RANK_ZERO = """
import sys
import numpy as np
from twinkle.core.adapter import AdapterConfig
from twinkle.core.logs import configure_logging
from twinkle.core.settings import Settings
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.process import build_engine

configure_logging("INFO", json=False)
model, shard, timeout_s = sys.argv[1:]
settings = Settings(model=model, model_name="tiny", ranks=2, shard=shard, threads=1, rank_timeout_s=float(timeout_s))
engine = build_engine(settings)
print(*engine.follower_pids, flush=True)
adapter = engine.create(AdapterConfig(base_model="tiny", rank=4, seed=0))
tokens = np.arange(40)
datum = WireDatum(tokens, {"target_tokens": tokens, "weights": np.ones(40, dtype=np.float32)})
body = ForwardBackwardBody("adapter", 0, False, "cross_entropy", {}, (datum,) * 4)
for step in range(1_000_000):
    [answer] = engine.run_passes([Pass(state=adapter, body=body)])
    if isinstance(answer, Exception):
        sys.exit(f"an operation took the blame: {answer}")
    engine.optim_step(adapter, AdamParams(learning_rate=1e-3))
    if step == 20:
        print("in the middle", flush=True)
"""


class Mesh:
    """Rank 0 at work in a process of its own, and the rank that follows it."""

    def __init__(self, model: Path, *, shard: str, timeout_s: float) -> None:
        self.rank_0 = subprocess.Popen(
            [sys.executable, "-c", RANK_ZERO, str(model), shard, str(timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._follower: psutil.Process | None = None

    @property
    def follower(self) -> psutil.Process:
        """Rank 1, as soon as the mesh is in the middle of its work."""
        assert self.rank_0.stdout is not None
        if self._follower is None:
            lines = iter(self.rank_0.stdout.readline, "")
            pid = next(line for line in lines if line.strip().isdigit())
            self._follower = psutil.Process(int(pid))
            assert next(line for line in lines if "in the middle" in line)
        return self._follower

    def end(self) -> None:
        self.rank_0.kill()
        self.rank_0.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, texts=["a tiny text"] * 4, hidden_size=64, layers=2, vocab_size=300)


@pytest.fixture(scope="module")
def meshes(model: Path) -> Iterator[list[Mesh]]:
    """One for each way to die, all started at once."""
    started = [
        Mesh(model, shard="fsdp", timeout_s=600.0),
        Mesh(model, shard="replicate", timeout_s=600.0),
    ]
    yield started
    for mesh in started:
        mesh.end()


def test_rank_zero_ends_when_a_follower_is_killed(meshes: list[Mesh]) -> None:
    mesh = meshes[0]

    mesh.follower.kill()
    _, said = mesh.rank_0.communicate(timeout=ENDS_S)

    assert mesh.rank_0.returncode == EXIT_RANK_LOST, said
    assert "rank.lost" in said


def test_followers_end_when_rank_zero_is_killed(meshes: list[Mesh]) -> None:
    mesh = meshes[1]
    follower = mesh.follower

    mesh.rank_0.kill()

    wait_until(gone(follower), what="the follower's end", deadline_s=ENDS_S)


@pytest.mark.soak
def test_a_rank_that_answers_no_more_is_not_waited_for_longer_than_said(model: Path) -> None:
    mesh = Mesh(model, shard="replicate", timeout_s=STUCK_AFTER_S)
    try:
        follower = mesh.follower

        os.kill(follower.pid, signal.SIGSTOP)
        _, said = mesh.rank_0.communicate(timeout=STUCK_AFTER_S + ENDS_S)

        assert mesh.rank_0.returncode == EXIT_RANK_LOST, said
        wait_until(gone(follower), what="the follower's end", deadline_s=ENDS_S)
    finally:
        mesh.end()


def test_a_model_that_cannot_be_loaded_is_refused_and_no_rank_is_left(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TWINKLE_MODEL"):
        build_engine(Settings(model=str(tmp_path), ranks=2))

    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in alive if "twinkle.workers.ranks.follower" in child.cmdline()]


def gone(process: psutil.Process) -> Callable[[], bool]:
    """Whether a process has ended; nobody may have collected it yet."""
    return lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
