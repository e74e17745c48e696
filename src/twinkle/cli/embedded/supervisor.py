"""Processes that are kept alive: started, watched, restarted with back-off, and stopped within a bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from twinkle.cli.exit_codes import EXIT_ERROR, EXIT_TRY_AGAIN
from twinkle.core.process.background import say_if_it_ends
from twinkle.core.process.parent_death import dies_with

Say = Callable[[str], None]

_FIRST_PAUSE_S = 0.5
_FORGIVEN_AFTER_S = 10.0
_REFUSED_PAUSE_S = 1.0
_MOST_QUICK_FALLS = 8
"""In a row: about a minute and a half of pauses, unless they are to be shorter."""
_LOG_BYTES = 20 * 2**20
_LAST_WORDS_BYTES = 4096
_GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to run, and how long it may take to stop in good order."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    stop_timeout_s: float
    longest_pause_s: float


@dataclass
class BackOff:
    """The pause before a restart: doubling, and forgotten once a process has lived for a while."""

    longest_s: float
    pause_s: float = _FIRST_PAUSE_S
    _quick_falls: int = 0

    def num_quick_falls(self, fall: Fall) -> int:
        """How many falls in a row, with this one, came soon after a start.

        What only has to wait does not count, nor what was killed, which may be anybody's doing.
        """
        is_its_own = fall.exit_code >= 0 and fall.exit_code != EXIT_TRY_AGAIN
        is_quick = is_its_own and fall.lived_s < _FORGIVEN_AFTER_S
        self._quick_falls = self._quick_falls + 1 if is_quick else 0
        return self._quick_falls

    def after(self, lived_s: float) -> float:
        """The pause for a process that ended after ``lived_s`` seconds."""
        if lived_s >= _FORGIVEN_AFTER_S:
            self.pause_s = _FIRST_PAUSE_S
        pause, self.pause_s = min(self.pause_s, self.longest_s), min(self.pause_s * 2, self.longest_s)
        return pause


@dataclass(frozen=True, kw_only=True)
class Fall:
    """A child that ended by itself."""

    name: str
    exit_code: int
    lived_s: float
    last_words: str
    gives_up: bool = False
    """Whether it has ended so soon so often that it is not started again."""

    @property
    def is_refusal(self) -> bool:
        """Whether a restart alone does not mend it: it ended with one of our own errors, or again and again."""
        return self.exit_code == EXIT_ERROR or self.gives_up

    def __str__(self) -> str:
        how = f"code {self.exit_code}"
        if self.exit_code < 0:
            how = signal.Signals(-self.exit_code).name
        words = f": {self.last_words}" if self.last_words else ""
        return f"{self.name} ended with {how} after {self.lived_s:.1f} s{words}"


class Guard:
    """Our end of the process that ends the children's groups if we are killed (``guard.py``)."""

    def __init__(self) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD)], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def add(self, group: int) -> None:
        """Put a process group into its care."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Take a group that has ended out of its care: its number may be used again."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Let it go; it kills whatever is still in its care."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()


@dataclass
class Child:
    """One process that is restarted whenever it ends, until told to stop or until it refuses its settings.

    It leads a process group of its own, so that a Ctrl-C in the terminal reaches only the supervisor, and so that what
    it started can be ended with it.
    """

    spec: ChildSpec
    guard: Guard
    say: Say
    on_fall: Callable[[Fall], None] = lambda fall: None
    num_restarts: int = 0
    _process: Process | None = None
    _watch: asyncio.Task[None] | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _back_off: BackOff = field(init=False)

    def __post_init__(self) -> None:
        self._back_off = BackOff(self.spec.longest_pause_s)

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it and begin to watch."""
        self._process = await self._spawn()
        self._watch = asyncio.create_task(self._keep_alive(self._process), name=f"watch {self.spec.name}")
        say_if_it_ends(self._watch)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Ask it to end, wait for as long as its spec allows or until ``hurry``, then kill its whole group."""
        self._stopping.set()
        if self._watch is None:
            return
        if self._process is not None:
            _signal_process(self._process, signal.SIGTERM)
        impatience = asyncio.create_task(hurry.wait())
        done, _ = await asyncio.wait(
            {self._watch, impatience}, timeout=self.spec.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        impatience.cancel()
        if self._watch not in done and self._process is not None:
            if not hurry.is_set():
                self.say(f"{self.spec.name} did not stop within {self.spec.stop_timeout_s:.0f} s and is killed")
            kill_group(self._process.pid)
        await self._watch

    async def _keep_alive(self, process: Process) -> None:
        while True:
            started = time.monotonic()
            exit_code = await process.wait()
            self._process = None
            kill_group(process.pid)
            self.guard.remove(process.pid)
            if self._stopping.is_set():
                return
            fall = Fall(
                name=self.spec.name,
                exit_code=exit_code,
                lived_s=time.monotonic() - started,
                last_words=_last_line(self.spec.log),
            )
            if self._back_off.num_quick_falls(fall) > _MOST_QUICK_FALLS:
                fall = replace(fall, gives_up=True)
            self.on_fall(fall)
            if fall.is_refusal:
                times = f", {_MOST_QUICK_FALLS + 1} times in a row" if fall.gives_up else ""
                self.say(f"{fall}{times}; it is not started again (log: {self.spec.log})")
                return
            pause_s = self._back_off.after(fall.lived_s)
            self.say(f"{fall} (log: {self.spec.log})")
            try:
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            except TimeoutError:
                started_again = await self._spawn_patiently()
                if started_again is None:
                    return
                process = self._process = started_again
                self.num_restarts += 1
                # Said when it is so: a stop may come in the pause.
                self.say(f"{self.spec.name} was restarted after {pause_s:.1f} s")
            else:
                return
            if self._stopping.is_set():  # asked to stop while it was being spawned
                _signal_process(process, signal.SIGTERM)

    async def _spawn_patiently(self) -> Process | None:
        """Start it, however often the machine refuses (no memory, a full disk); nothing once it is to stop."""
        while not self._stopping.is_set():
            try:
                return await self._spawn()
            except OSError as error:
                self.say(f"{self.spec.name} cannot be started ({error}); tried again in {_REFUSED_PAUSE_S} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _REFUSED_PAUSE_S)
        return None

    async def _spawn(self) -> Process:
        log_path = self.spec.log
        if log_path.exists() and log_path.stat().st_size > _LOG_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=dict(self.spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with(os.getpid()),
            )
        self.guard.add(process.pid)
        return process


def _signal_process(process: Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        return


def kill_group(leader_pid: int) -> None:
    """Kill what is left of a process group."""
    try:
        os.killpg(leader_pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError:  # macOS says so for a group of zombies
        return


def _last_line(log: Path) -> str:
    """The last thing a child said, for the console."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
