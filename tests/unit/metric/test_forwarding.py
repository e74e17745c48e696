"""Tools that a training is watched with: fed in a thread of their own, and real ones where they are installed."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.polling import wait_until
from twinkle.metric.forwarding_thread import ForwardingThread


class Slow:
    """A tool whose server answers when it is let."""

    def __init__(self, is_let: threading.Event) -> None:
        self.is_let = is_let
        self.taken: list[int] = []
        self.threads = {threading.current_thread()}
        self.is_closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.is_let.wait()
        self.threads.add(threading.current_thread())
        self.taken.append(step)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def is_let() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_tool_that_hangs_holds_up_nothing_and_gets_all_in_order_and_in_one_thread(is_let: threading.Event) -> None:
    tools: list[Slow] = []
    thread = ForwardingThread("slow", lambda: tools.append(Slow(is_let)) or tools[0])

    for step in range(5):
        thread.log({"loss": 1.0}, step)
    assert tools[0].taken == [] and not thread.has_ended
    is_let.set()
    thread.close()

    assert tools[0].taken == [0, 1, 2, 3, 4] and tools[0].is_closed
    assert tools[0].threads != {threading.current_thread()} and len(tools[0].threads) == 1


def test_a_tool_that_is_too_far_behind_or_does_not_end_is_told_once_and_left(is_let: threading.Event) -> None:
    with capture_logs() as logs:
        behind = ForwardingThread("behind", lambda: Slow(is_let), most_waiting=2)
        for step in range(9):
            behind.log({}, step)
        stuck = ForwardingThread("stuck", lambda: Slow(is_let))
        stuck.log({}, 1)
        stuck.close(wait_s=0.01)
        late = ForwardingThread("late", lambda: is_let.wait() and Slow(is_let), open_s=0.01)
        late.log({}, 1)
        is_let.set()
        late.close()

    said = [(line["forwarder"], line.get("error", line.get("reason"))) for line in logs]
    assert said == [
        ("behind", "it is 2 records behind"),
        ("stuck", "it has not taken everything within 0.01 s"),
        ("late", "it has not opened within 0.01 s"),
    ]
    assert behind.has_ended and stuck.has_ended


def test_a_tool_that_does_not_open_or_fails_later_is_told_by_its_own_words(is_let: threading.Event) -> None:
    def refuse() -> Slow:
        raise ConnectionError("no key")

    class Full(Slow):
        def log(self, values: Mapping[str, float], step: int) -> None:
            raise OSError("no space")

    with capture_logs() as logs:
        refused = ForwardingThread("refused", refuse)
        full = ForwardingThread("full", lambda: Full(is_let))
        full.log({}, 1)
        wait_until(lambda: full.has_ended, what="its end")
        for each in (refused, full):
            each.log({}, 2)
            each.close()

    assert [(line["forwarder"], line["error"]) for line in logs] == [
        ("refused", "ConnectionError: no key"),
        ("full", "OSError: no space"),
    ]


TRAINING = """
import json, sys
from structlog.testing import capture_logs
from twinkle.metric.forwarding import Forwarding
from twinkle.metric.records import STEP, Records

records, forwarding = Records(clock=lambda: 0.0), Forwarding()
with capture_logs() as logs:
    forwarding.add(sys.argv[1], json.loads(sys.argv[2]))
    for step in (1, 2):
        forwarding.send(records.add(STEP, step, {"loss": 3.0 / step}))
    forwarding.send(records.add("train", 2, {"learning rate(param group 1)": "0.5"}))
assert forwarding.names() == [sys.argv[1]] and logs == [], logs
"""


def train(tool: str, folder: Path, **settings: object) -> None:
    """A script that sends to the tool and ends, without a word of closing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRACKIO_DIR": str(folder / "trackio")}
    command = [sys.executable, "-c", TRAINING, tool, json.dumps(settings)]
    subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=240, check=True)


@pytest.mark.soak
def test_tensorboard_shows_what_was_trained(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'twinkle-queue[tensorboard]'")
    train("tensorboard", tmp_path, log_dir="runs")

    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 3.0), (2, 1.5)]
    assert found.Scalars("train/learning rate(param group 1)")[0].value == 0.5


@pytest.mark.soak
def test_mlflow_shows_what_was_trained(tmp_path: Path) -> None:
    if find_spec("mlflow") is None:
        pytest.skip("pip install 'twinkle-queue[mlflow]'")
    train("mlflow", tmp_path, tracking_uri="sqlite:///mlflow.db")

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        found = database.execute("select key, step, value from metrics order by key, step").fetchall()
        ((status,),) = database.execute("select status from runs").fetchall()
    assert found == [("train/learning rate param group 1", 2, 0.5), ("train/loss", 1, 3.0), ("train/loss", 2, 1.5)]
    assert status == "FINISHED"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "settings", "written"),
    [
        ("wandb", {"mode": "offline"}, "wandb/offline-run-*/*.wandb"),
        ("swanlab", {"mode": "offline"}, "swanlog/run-*/*.swanlab"),
        ("trackio", {}, "trackio/twinkle.db"),
    ],
)
def test_a_run_of_a_tool_holds_what_was_trained(
    name: str, settings: dict[str, object], written: str, tmp_path: Path
) -> None:
    if find_spec(name) is None:
        pytest.skip(f"pip install 'twinkle-queue[{name}]'")
    train(name, tmp_path, **settings)

    (file,) = tmp_path.glob(written)
    held = b"".join(part.read_bytes() for part in file.parent.glob(f"{file.name}*"))
    assert b"train/loss" in held and b"learning rate(param group 1)" in held
