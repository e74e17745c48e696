"""A run that is killed in the middle, to be held against one that nothing happened to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import tinker

from harness.served import Served


def train(
    client: tinker.TrainingClient,
    send_pass: Callable[[int], Any],
    *,
    num_steps: int,
    kills: Mapping[int, Callable[[], None]],
) -> tuple[list[float], str]:
    """Pipelined steps, with a kill behind some of them; the losses, and where the state was saved."""
    pending = []
    for step in range(num_steps):
        passed = send_pass(step)
        client.optim_step(tinker.AdamParams(learning_rate=1e-2))
        pending.append(passed)
        if step in kills:
            passed.result()
            kills[step]()
    losses = [passed.result().metrics["loss:sum"] for passed in pending]
    return losses, client.save_state("end").result().path


def stored_hashes(served: Served, path: str) -> dict[str, str]:
    """The SHA-256 of each file of a training checkpoint."""
    stored = dict(served.query("SELECT path, files FROM checkpoint WHERE kind = 'training'"))
    return {name: entry["sha256"] for name, entry in json.loads(stored[path]).items()}
