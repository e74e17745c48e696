"""A mesh that loses a rank in the middle of its work ends as a whole, soon, and says why."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.polling import wait_until
from harness.rank_zero import RankZero
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.workers.process import build_engine
from twinkle.workers.ranks.world import EXIT_RANK_LOST

ENDS_S = 60.0
STUCK_AFTER_S = 20


def mesh_of(model: Path, *, shard: str, timeout_s: float, **more: int) -> RankZero:
    """A mesh of two ranks at work."""
    return RankZero(model, ranks=2, shard=shard, threads=1, rank_timeout_s=timeout_s, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, texts=["a tiny text"] * 4, hidden_size=64, layers=2, vocab_size=300)


@pytest.fixture(scope="module")
def meshes(model: Path) -> Iterator[list[RankZero]]:
    """One for each way to die, all started at once."""
    started = [
        mesh_of(model, shard="fsdp", timeout_s=600.0),
        mesh_of(model, shard="fsdp", timeout_s=600.0, raises_on=1),
    ]
    yield started
    for mesh in started:
        mesh.end()


def test_rank_zero_ends_when_a_follower_is_killed(meshes: list[RankZero]) -> None:
    mesh = meshes[0]

    mesh.ranks[0].kill()
    code, said = mesh.ended(ENDS_S)

    assert code == EXIT_RANK_LOST, said
    assert "rank.lost" in said


@pytest.mark.soak
def test_followers_end_when_rank_zero_is_killed(model: Path) -> None:
    mesh = mesh_of(model, shard="replicate", timeout_s=600.0)
    try:
        follower = mesh.ranks[0]
    finally:
        mesh.end()

    wait_until(gone(follower), what="the follower's end", deadline_s=ENDS_S)


def test_a_mesh_ends_soon_when_a_rank_fails_for_which_the_others_wait(meshes: list[RankZero]) -> None:
    mesh = meshes[1]
    follower = mesh.ranks[0]

    code, said = mesh.ended(ENDS_S)

    assert code == EXIT_RANK_LOST, said
    assert "rank 1 ended an order with RuntimeError" in said
    wait_until(gone(follower), what="the follower's end", deadline_s=ENDS_S)


@pytest.mark.soak
def test_a_mesh_ends_soon_when_the_first_rank_fails_for_which_the_others_wait(model: Path) -> None:
    mesh = mesh_of(model, shard="fsdp", timeout_s=600.0, raises_on=0)
    try:
        code, said = mesh.ended(ENDS_S)
    finally:
        mesh.end()

    assert code == EXIT_RANK_LOST, said
    assert "rank 0 ended an order with RuntimeError" in said


@pytest.mark.soak
def test_a_rank_that_answers_no_more_is_not_waited_for_longer_than_said(model: Path) -> None:
    mesh = mesh_of(model, shard="replicate", timeout_s=STUCK_AFTER_S)
    try:
        follower = mesh.ranks[0]

        os.kill(follower.pid, signal.SIGSTOP)
        code, said = mesh.ended(STUCK_AFTER_S + ENDS_S)

        assert code == EXIT_RANK_LOST, said
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
