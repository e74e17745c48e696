"""Workers of meshes that are asked for while the stack runs."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import cast

import pytest

from twinkle.cli.embedded import asked_meshes
from twinkle.cli.embedded.asked_meshes import AskedMeshes
from twinkle.cli.embedded.replicas import Replicas
from twinkle.cli.embedded.stack import MeshPlan
from twinkle.cli.embedded.supervisor import Child
from twinkle.core.clock import SystemClock
from twinkle.core.settings import Settings
from twinkle.storage.schema import upgrade_patiently
from twinkle.storage.stores import Stores

PATIENCE_S = 60.0


class _Reluctant:
    """A process that the machine has no memory for, at first."""

    num_starts = 0

    def __init__(self, is_up: asyncio.Event) -> None:
        self._is_up = is_up

    async def start(self) -> None:
        _Reluctant.num_starts += 1
        if _Reluctant.num_starts == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self._is_up.set()


async def test_a_worker_that_the_machine_refuses_is_started_by_a_later_look_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asked_meshes, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(_Reluctant, "num_starts", 0)
    settings, clock = Settings(home=tmp_path), SystemClock()
    stores = Stores.at(f"sqlite:///{tmp_path / 'journal.db'}", clock)
    upgrade_patiently(stores.database.url, clock)
    stores.moves.ask_for("second", "second=cpu")
    is_up = asyncio.Event()

    def make_child(plan: MeshPlan) -> Child:
        assert plan.name == "second"
        return cast(Child, _Reluctant(is_up))

    asked = AskedMeshes(
        settings,
        stores.meshes,
        stores.moves,
        replicas=Replicas(settings, [], stores.meshes, stores.moves, clock),
        started={},
        make_child=make_child,
    )
    following = asyncio.create_task(asked.follow(asyncio.Event()))
    await asyncio.wait_for(is_up.wait(), PATIENCE_S)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    stores.close()

    assert _Reluctant.num_starts == 2
    assert list(asked.workers) == ["second"]
    assert "no process can be started for a mesh that is asked for" in capsys.readouterr().out
