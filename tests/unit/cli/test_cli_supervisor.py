"""Children that are kept alive and never left behind. Real processes throughout."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from twinkle.cli.embedded.supervisor import BackOff, Child, ChildSpec, Fall, Guard
from twinkle.cli.exit_codes import EXIT_TRY_AGAIN

DEADLINE_S = 60.0
WITH_GRANDCHILD = """
import os, pathlib, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
file = pathlib.Path(sys.argv[1])
file.with_suffix(".tmp").write_text(f"{os.getpid()} {grandchild.pid}")
file.with_suffix(".tmp").rename(file)
time.sleep(600)
"""
IGNORES_SIGTERM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


def spec(tmp_path: Path, code: str, *arguments: str, stop_timeout_s: float = 10.0) -> ChildSpec:
    return ChildSpec(
        name="child",
        argv=(sys.executable, "-S", "-c", code, *arguments),
        env=dict(os.environ),
        log=tmp_path / "child.log",
        stop_timeout_s=stop_timeout_s,
        longest_pause_s=30.0,
    )


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_pause_doubles_up_to_half_a_minute_and_is_forgotten_after_ten_seconds_of_life() -> None:
    back_off = BackOff(longest_s=30.0)
    assert [back_off.after(0.1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert back_off.after(10.0) == 0.5
    assert back_off.after(1.0) == 1


def test_an_operator_may_have_shorter_pauses() -> None:
    back_off = BackOff(longest_s=1.5)
    assert [back_off.after(0.1) for _ in range(4)] == [0.5, 1, 1.5, 1.5]


async def test_a_killed_child_comes_back_and_it_is_said(tmp_path: Path, guard: Guard) -> None:
    said: list[str] = []
    falls: list[Fall] = []
    child = Child(spec(tmp_path, "import time; time.sleep(600)"), guard, said.append, falls.append)
    await child.start()
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.num_restarts == 1)
    assert child.pid not in (None, first)
    assert not is_running(first)
    assert falls[0].exit_code == -signal.SIGKILL
    assert "child ended with SIGKILL" in said[0]
    assert said[1] == "child was restarted after 0.5 s"
    await child.stop(asyncio.Event())


async def test_a_child_that_could_not_be_started_again_is_started_once_it_can(tmp_path: Path, guard: Guard) -> None:
    """Its watch would end unseen, and nobody would ever start it."""
    said: list[str] = []
    (tmp_path / "logs").mkdir()
    child = Child(
        spec(tmp_path / "logs", "import time; time.sleep(600)"), guard, said.append, lambda _: away(tmp_path / "logs")
    )
    await child.start()
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: any("cannot be started" in line for line in said))
    (tmp_path / "logs").mkdir()
    await until(lambda: child.num_restarts == 1)
    assert child.pid not in (None, first)
    await child.stop(asyncio.Event())


def away(folder: Path) -> None:
    shutil.rmtree(folder)


async def test_the_last_words_of_a_child_are_repeated(tmp_path: Path, guard: Guard) -> None:
    said: list[str] = []
    falls: list[Fall] = []
    code = "import sys; print('working', flush=True); sys.exit('twinkle: no such model')"
    child = Child(spec(tmp_path, code), guard, said.append, falls.append)
    await child.start()
    await until(lambda: said)
    assert falls[0].last_words == "twinkle: no such model"
    assert "no such model" in said[0]
    await child.stop(asyncio.Event())


async def test_what_a_dead_child_had_started_does_not_outlive_it(tmp_path: Path, guard: Guard) -> None:
    pids = tmp_path / "pids"
    child = Child(spec(tmp_path, WITH_GRANDCHILD, str(pids)), guard, lambda _: None)
    await child.start()
    await until(pids.exists)
    leader, grandchild = map(int, pids.read_text().split())
    os.kill(leader, signal.SIGKILL)
    await until(lambda: not is_running(grandchild))
    await child.stop(asyncio.Event())


async def test_stop_waits_for_an_orderly_end_and_nothing_comes_back(tmp_path: Path, guard: Guard) -> None:
    done = tmp_path / "done"
    ready = tmp_path / "ready"
    code = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.3)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[2]).touch()
time.sleep(600)
"""
    child = Child(spec(tmp_path, code, str(done), str(ready)), guard, lambda _: None)
    await child.start()
    await until(ready.exists)
    pid = child.pid
    await child.stop(asyncio.Event())
    assert done.exists()
    assert pid is not None
    assert not is_running(pid)
    assert child.num_restarts == 0


async def test_a_child_that_will_not_stop_is_killed_after_its_time(tmp_path: Path, guard: Guard) -> None:
    said: list[str] = []
    ready = tmp_path / "ready"
    child = Child(spec(tmp_path, IGNORES_SIGTERM, str(ready), stop_timeout_s=0.3), guard, said.append)
    await child.start()
    await until(ready.exists)
    pid = child.pid
    assert pid is not None
    await child.stop(asyncio.Event())
    assert not is_running(pid)
    assert "did not stop within" in said[0]


async def test_a_hurry_cuts_the_waiting_short(tmp_path: Path, guard: Guard) -> None:
    ready = tmp_path / "ready"
    child = Child(spec(tmp_path, IGNORES_SIGTERM, str(ready), stop_timeout_s=600), guard, lambda _: None)
    await child.start()
    await until(ready.exists)
    hurry = asyncio.Event()
    stop = asyncio.create_task(child.stop(hurry))
    hurry.set()
    await asyncio.wait_for(stop, DEADLINE_S)


async def test_a_stop_during_the_pause_starts_nothing_more(tmp_path: Path, guard: Guard) -> None:
    falls: list[Fall] = []
    said: list[str] = []
    child = Child(spec(tmp_path, "raise SystemExit(1)"), guard, said.append, falls.append)
    await child.start()
    await until(lambda: falls)
    await asyncio.wait_for(child.stop(asyncio.Event()), DEADLINE_S)
    assert child.pid is None
    assert not any("restarted" in line for line in said)


async def test_nothing_is_left_when_the_supervisor_is_killed_outright(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    supervisor_code = textwrap.dedent(
        f"""
        import asyncio, os, pathlib, sys
        from twinkle.cli.embedded.supervisor import Child, ChildSpec, Guard
        async def main():
            spec = ChildSpec(name="child", argv=(sys.executable, "-c", {WITH_GRANDCHILD!r}, {str(pids)!r}),
                             env=dict(os.environ), log=pathlib.Path({str(tmp_path / "child.log")!r}),
                             stop_timeout_s=5, longest_pause_s=30)
            await Child(spec, Guard(), print).start()
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    supervisor = subprocess.Popen([sys.executable, "-c", supervisor_code])  # noqa: ASYNC220 - returns at once
    await until(pids.exists)
    guard_pid = next(
        process.pid
        for process in psutil.Process(supervisor.pid).children()
        if "guard.py" in " ".join(process.cmdline())
    )
    leader, grandchild = map(int, pids.read_text().split())
    supervisor.kill()
    supervisor.wait()
    await until(lambda: not any(is_running(pid) for pid in (leader, grandchild, guard_pid)))


async def test_a_child_that_falls_again_and_again_is_given_up(tmp_path: Path, guard: Guard) -> None:
    said: list[str] = []
    falls: list[Fall] = []
    hasty = replace(spec(tmp_path, "raise SystemExit('no such file')"), longest_pause_s=0.0)
    child = Child(hasty, guard, said.append, falls.append)
    await child.start()
    await until(lambda: any("not started again" in line for line in said))

    assert [fall.is_refusal for fall in falls] == [False] * 8 + [True]
    assert "no such file, 9 times in a row; it is not started again" in said[-1] and child.pid is None
    await child.stop(asyncio.Event())


def test_what_only_has_to_wait_is_never_given_up() -> None:
    back_off = BackOff(longest_s=30.0)
    waits = Fall(name="api", exit_code=EXIT_TRY_AGAIN, lived_s=0.1, last_words="the database is away")
    assert {back_off.num_quick_falls(waits) for _ in range(100)} == {0}


async def test_a_child_that_refuses_its_settings_is_not_started_again_and_nobody_says_so(
    tmp_path: Path, guard: Guard
) -> None:
    said: list[str] = []
    falls: list[Fall] = []
    code = "import sys; print('twinkle: it caps its logits', file=sys.stderr); sys.exit(2)"
    child = Child(spec(tmp_path, code), guard, said.append, falls.append)
    await child.start()
    await until(lambda: said)

    assert falls[0].is_refusal
    assert "it caps its logits; it is not started again" in said[0]
    await child.stop(asyncio.Event())
    assert (child.num_restarts, len(falls), len(said)) == (0, 1, 1)
