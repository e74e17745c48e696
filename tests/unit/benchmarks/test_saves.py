"""The benchmark of saves measures what it says."""

from __future__ import annotations

import importlib
from pathlib import Path


def test_runs_are_answered_while_saves_are_on_their_way(tmp_path: Path) -> None:
    saves = importlib.import_module("saves")
    world = saves.World(tmp_path, 0.5)

    steps_s, saves_s = saves.measure(world, "a", num_saves=2)
    world.transfers.close()

    assert 0 < steps_s < saves_s
    assert saves_s > 2 * 0.5
