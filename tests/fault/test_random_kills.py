"""SIGKILL at random to every part of the embedded stack while tenants train: nothing lost, doubled, reordered."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tinker

from harness.served import PARTS, Served

NUM_RUNS = 4
NUM_STEPS = 300
IN_FLIGHT = 5
SEED = 20260121
POLL_S = 0.1
KILL_EVERY_S = (0.5, 3.0)
KILLS_IN_A_ROW = 3
PROGRESS = 200
"""Operations that end between two rows of kills: on a busy machine nothing would ever be up again before the next."""
VICTIMS = {**PARTS, "what the worker started": "spawn_main"}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def datum(run: int, step: int) -> tinker.Datum:
    tokens = [run + 1, step + 1, 7]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": [1.0, 1.0, 1.0]},
    )


def train(client: tinker.ServiceClient, number: int, ends: dict[int, list[dict[str, float]]]) -> None:
    run = client.create_lora_training_client(base_model="null", rank=4, seed=number).result()
    waiting, metrics = [], []
    for step in range(NUM_STEPS):
        run.forward_backward([datum(number, step)], "cross_entropy")
        waiting.append(run.optim_step(tinker.AdamParams(learning_rate=1e-3)))
        if len(waiting) > IN_FLIGHT:
            metrics.append(waiting.pop(0).result().metrics)
    metrics += [future.result().metrics for future in waiting]
    ends[number] = metrics


def train_all(served: Served) -> dict[int, list[dict[str, float]]]:
    client = served.client("soak")
    ends: dict[int, list[dict[str, float]]] = {}
    threads = [threading.Thread(target=train, args=(client, number, ends)) for number in range(NUM_RUNS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def kill_at_random(served: Served, stop: threading.Event, kills: list[str]) -> None:
    dice = random.Random(SEED)
    while not stop.wait(dice.uniform(*KILL_EVERY_S)):
        part = dice.choice(list(VICTIMS))
        for process in served.processes(VICTIMS[part])[:1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                kills.append(part)
                if len(kills) % KILLS_IN_A_ROW == 0:
                    wait_for_progress(served, stop)


def wait_for_progress(served: Served, stop: threading.Event) -> None:
    before = num_finished(served)
    while num_finished(served) < before + PROGRESS and not stop.wait(POLL_S):
        pass


def num_finished(served: Served) -> int:
    return int(served.query("SELECT COUNT(*) FROM operation WHERE state = 'done'")[0][0])


def test_random_kills_leave_every_run_as_if_nothing_had_happened(tmp_path: Path) -> None:
    kills: list[str] = []
    stop = threading.Event()
    with Served(tmp_path / "calm" / "home", model="null", flags=("--engine", "null")) as served:
        calm = train_all(served)
    with Served(tmp_path / "struck" / "home", model="null", flags=("--engine", "null")) as served:
        killer = threading.Thread(target=kill_at_random, args=(served, stop, kills))
        killer.start()
        started = time.monotonic()
        try:
            struck = train_all(served)
        finally:
            stop.set()
            killer.join()
        open_operations = served.query("SELECT COUNT(*) FROM operation WHERE state NOT IN ('done', 'failed')")
        states = served.query("SELECT state, COUNT(*) FROM operation GROUP BY state")
    print(f"{len(kills)} kills in {time.monotonic() - started:.0f} s: {sorted(set(kills))}; {states}")

    assert len(kills) >= 10
    assert len(set(kills)) >= 4
    assert struck == calm
    assert all([step["step"] for step in run] == list(range(1, NUM_STEPS + 1)) for run in struck.values())
    assert open_operations == [(0,)]
