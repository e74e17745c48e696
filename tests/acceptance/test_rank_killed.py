"""SIGKILL of one rank of a mesh of two, in the middle of a run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tinker

from harness.served import Served

# A minute for two meshes of two; what each rank does when one dies is held in tests/unit/workers/test_lost_ranks.py.
pytestmark = pytest.mark.soak

NUM_STEPS = 12
KILL_AFTER = 5
SETTINGS = {"TWINKLE_RANKS": "2", "TWINKLE_SHARD": "replicate", "TWINKLE_THREADS": "1"}


@dataclass(frozen=True)
class Run:
    """What a run of the SDK came to."""

    losses: list[float]
    path: str
    adapter: str


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


def batch(step: int) -> list[tinker.Datum]:
    rows = [[(7 * step + 3 * place + 11 * row) % 50 + 10 for place in range(12 + 5 * row)] for row in range(4)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def train(served: Served, tenant: str, *, kill_after: int | None = None) -> Run:
    """Pipelined steps; after one of them, with the others on their way, a rank dies."""
    client = served.client(tenant).create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    pending = []
    for step in range(NUM_STEPS):
        passed = client.forward_backward(batch(step), "cross_entropy")
        pending.append((passed, client.optim_step(tinker.AdamParams(learning_rate=1e-2))))
        if step == kill_after:
            passed.result()
            os.kill(served.follower_pid(), signal.SIGKILL)
    losses = [passed.result().metrics["loss:sum"] for passed, _ in pending]
    assert [stepped.result().metrics["step"] for _, stepped in pending] == [float(n + 1) for n in range(NUM_STEPS)]
    return Run(losses, client.save_state("end").result().path, client.model_id)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Seen:
    home = tmp_path_factory.mktemp("ranks") / "home"
    with Served(home, model=str(tiny_model), model_name="tiny", **SETTINGS) as served:
        calm = train(served, "calm")
        struck = train(served, "struck", kill_after=KILL_AFTER)
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
