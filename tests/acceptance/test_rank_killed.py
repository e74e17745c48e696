"""SIGKILL of one rank of a mesh of two, in the middle of a run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from harness.served import Served
from harness.struck_training import NUM_STEPS, Run, train

# A minute for two meshes of two; what each rank does when one dies is held in tests/unit/workers/test_lost_ranks.py.
pytestmark = pytest.mark.soak

KILL_AFTER = 5
SETTINGS = {"TWINKLE_RANKS": "2", "TWINKLE_SHARD": "replicate", "TWINKLE_THREADS": "1"}


@dataclass(frozen=True)
class Seen:
    """Two runs of the same training, and what the journal says of them."""

    calm: Run
    struck: Run
    sha256s: dict[str, dict[str, str]]
    operations: list[tuple]
    epochs: int
    capabilities: dict[str, object]
    left_over: list[int]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Seen:
    home = tmp_path_factory.mktemp("ranks") / "home"
    with Served(home, model=str(tiny_model), model_name="tiny", **SETTINGS) as served:
        calm = train(served, "calm")
        struck = train(
            served, "struck", after=KILL_AFTER, strike=lambda: os.kill(served.follower_pid(), signal.SIGKILL)
        )
        processes = psutil.Process(served.pid).children(recursive=True)
        assert served.follower_pid() in {process.pid for process in processes}
        files = served.query("SELECT path, files FROM checkpoint WHERE kind = 'training'")
        operations = served.query("SELECT seq, state FROM operation WHERE lane = ? ORDER BY seq", struck.adapter)
        [(epochs, capabilities)] = served.query("SELECT epoch, capabilities FROM mesh")
    _, left_over = psutil.wait_procs(processes, timeout=10)
    return Seen(
        calm=calm,
        struck=struck,
        sha256s={path: {name: file["sha256"] for name, file in json.loads(text).items()} for path, text in files},
        operations=operations,
        epochs=epochs,
        capabilities=json.loads(capabilities),
        left_over=[process.pid for process in left_over if process.status() != psutil.STATUS_ZOMBIE],
    )


def test_the_run_ends_with_the_same_weights_and_moments(seen: Seen) -> None:
    assert set(seen.sha256s[seen.calm.path]) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
    }
    assert seen.sha256s[seen.struck.path] == seen.sha256s[seen.calm.path]


def test_every_loss_is_the_same_to_the_bit(seen: Seen) -> None:
    assert seen.struck.losses == seen.calm.losses


def test_the_journal_holds_each_operation_once_and_done(seen: Seen) -> None:
    assert seen.operations == [(seq, "done") for seq in range(2 * NUM_STEPS + 2)]


def test_the_mesh_ended_as_a_whole_and_began_again(seen: Seen) -> None:
    assert seen.epochs == 2


def test_the_mesh_says_how_many_ranks_it_has(seen: Seen) -> None:
    assert (seen.capabilities["ranks"], seen.capabilities["shard"]) == (2, "replicate")


def test_no_process_outlives_the_service(seen: Seen) -> None:
    assert seen.left_over == []
