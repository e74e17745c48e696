"""Workers that end while the script goes on, and a script that ends while its workers go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import twinkle
from harness.local_ray import ray
from harness.polling import wait_until
from twinkle.core.errors import RankLost
from twinkle.infra.device_mesh import current_rank
from twinkle.infra.rank_end import patience_s
from twinkle.infra.ray.calls import Workers

INTERRUPTED = """
import os, time, twinkle
from twinkle import DeviceGroup

@twinkle.remote_class()
class Sleeper:
    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def processes(self):
        return os.getpid(), os.getppid()

    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def sleep(self):
        print("asleep", flush=True)
        time.sleep(600)

twinkle.initialize(mode="ray", groups=[DeviceGroup("night", 2, "cpu")])
sleeper = Sleeper(remote_group="night")
print("processes", *(number for pair in sleeper.processes() for number in pair), flush=True)
sleeper.sleep()
"""

FAILED_UNSEEN = """
import twinkle
from twinkle import DeviceGroup

@twinkle.remote_class()
class Failing:
    @twinkle.remote_function(dispatch="all")
    def fail(self):
        raise ValueError("too late")

twinkle.initialize(mode="ray", groups=[DeviceGroup("one", 1, "cpu")])
Failing(remote_group="one").fail()
"""


@twinkle.remote_class()
class Waiting:
    """Ranks that wait for each other."""

    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def process(self) -> int:
        """Its number."""
        return os.getpid()

    @twinkle.remote_function(dispatch="all")
    def die(self, rank: int) -> None:
        """One rank ends in the middle of what the others wait for."""
        if current_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    @twinkle.remote_function(dispatch="all")
    def part(self, rank: int) -> None:
        """One rank ends a while after the others have lost its connection."""
        if current_rank() == rank:
            torch.distributed.destroy_process_group()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def stumble(self, rank: int) -> None:
        """One rank raises in the middle of what the others wait for."""
        if current_rank() == rank:
            raise ValueError("stumbled")
        torch.distributed.barrier()


@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize("is_collected", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_death_of_a_worker_is_raised_with_its_place_and_leaves_nobody_waiting(is_collected: bool) -> None:
    waiting = Waiting(remote_group="model", instance_id=f"mortal {is_collected}")
    processes = waiting.process()
    result = waiting.die(1)

    with pytest.raises(RankLost, match=r"rank 1 of group 'model' ended during Waiting\.die.*last checkpoint") as lost:
        result() if is_collected else waiting.process()

    assert lost.value.context == {"group": "model", "rank": 1, "call": "Waiting.die"}
    with pytest.raises(RankLost, match="cannot run: rank 1 of group 'model'"):
        waiting.process()
    wait_until(lambda: not any(psutil.pid_exists(each) for each in processes), what="the workers' end")


@pytest.mark.usefixtures("on_ray")
def test_the_death_of_a_worker_is_told_also_where_the_others_raise_before_it_is_seen() -> None:
    waiting = Waiting(remote_group="model", instance_id="parting")

    with pytest.raises(RankLost, match=r"rank 1 of group 'model' ended during Waiting\.part"):
        waiting.part(1)()


@pytest.mark.soak
@pytest.mark.usefixtures("on_ray")
def test_a_rank_that_raises_does_not_hold_the_next_call_behind_those_that_wait_for_it() -> None:
    waiting = Waiting(remote_group="model", instance_id="stumbling")
    processes = waiting.process()

    with pytest.raises(ValueError, match="stumbled"):
        waiting.stumble(1)
    with pytest.raises(RankLost, match=r"rank 1 raised ValueError in Waiting\.stumble, and ranks \[0\] had not ended"):
        waiting.process()

    wait_until(lambda: not any(psutil.pid_exists(each) for each in processes), what="the workers' end")


def test_ranks_may_work_on_as_long_again_as_one_that_has_raised() -> None:
    assert [patience_s(taken_s) for taken_s in (0.1, 10, 45)] == [10, 10, 45]


@ray.remote(num_cpus=0)
class Meeting:
    """Ranks before they hold anything."""

    def meet(self, how: str) -> str:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("nobody came")
        if how == "waits":
            threading.Event().wait()
        return how


@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize(("ways", "rank"), [(["waits", "dies"], 1), (["raises", "dies"], 1), (["raises", "comes"], 0)])
def test_a_worker_that_is_lost_before_it_holds_anything_is_named(ways: list[str], rank: int) -> None:
    workers = Workers("model", [Meeting.remote() for _ in ways])  # type: ignore[attr-defined]
    calls = [handle.meet.remote(how) for handle, how in zip(workers.handles, ways, strict=True)]

    with pytest.raises(RankLost, match=f"rank {rank} of group 'model' ended during the meeting") as lost:
        workers.gathered("the meeting", calls)

    assert lost.value.context == {"group": "model", "rank": rank, "call": "the meeting"}
    with pytest.raises(RankLost, match="cannot run"):
        workers.require("a component")


@pytest.mark.usefixtures("on_ray")
def test_what_every_rank_gives_comes_in_their_order() -> None:
    workers = Workers("model", [Meeting.remote() for _ in range(2)])  # type: ignore[attr-defined]

    assert workers.gathered("start", [each.meet.remote(f"{rank}") for rank, each in enumerate(workers.handles)]) == [
        "0",
        "1",
    ]


def started(text: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(text)
    # Whoever runs the tests in the background has them, and all that they start, ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_script_that_is_interrupted_leaves_no_worker(tmp_path: Path) -> None:
    with started(INTERRUPTED, tmp_path) as script:
        assert script.stdout is not None
        processes: list[int] = []
        told = []
        for line in script.stdout:
            told.append(line)
            if line.startswith("processes"):
                processes = [int(number) for number in line.split()[1:]]
            if "asleep" in line:
                break
        script.send_signal(signal.SIGINT)
        rest = script.communicate(timeout=60)[0]

    assert script.returncode != 0 and "KeyboardInterrupt" in rest
    # Workers print under their group and rank.
    assert any("night rank" in line for line in told if "asleep" in line), told
    assert len(processes) == 4
    wait_until(lambda: not any(psutil.pid_exists(each) for each in processes), what="the workers' end")


@pytest.mark.soak
def test_a_script_that_never_saw_its_last_call_fail_does_not_end_well(tmp_path: Path) -> None:
    with started(FAILED_UNSEEN, tmp_path) as script:
        output = script.communicate(timeout=120)[0]

    assert script.returncode == 1
    assert "ValueError: too late" in output and "rank 0" in output
