"""Client processes that load a server through a client under measurement, one thread per adapter.

A thread does what a plain training script does: submit, then block in ``result()``. A client runs one event loop per
process, so several processes are used where there are several adapters.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

from sides import Adapter, Future, Side, sdk_side

START_DELAY_S = 0.3
ANSWER_TIMEOUT_S = 180.0

OpenSide = Callable[[str, str, int], Side]


@dataclass(frozen=True, kw_only=True)
class Window:
    """One measurement. Operations that begin and end within it count, all others only keep the load up."""

    num_adapters: int
    steps_in_flight: int
    """0: each operation is awaited before the next one is sent."""
    starts_at: float
    """On the monotonic clock, which all processes of a machine share."""
    duration_s: float

    @property
    def ends_at(self) -> float:
        """When it is over."""
        return self.starts_at + self.duration_s


@dataclass
class Observed:
    """What the threads of one process saw in a window: latencies in seconds by kind, and CPU time."""

    forward_backward: list[float] = field(default_factory=list)
    optim_step: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def num_operations(self) -> int:
        """How many operations began and ended within the window."""
        return len(self.forward_backward) + len(self.optim_step)

    def extend(self, other: Observed) -> None:
        """Take in what somebody else saw in the same window."""
        self.forward_backward += other.forward_backward
        self.optim_step += other.optim_step
        self.cpu_s += other.cpu_s


class LoadPool:
    """Client processes with adapters on one server. A context manager; outside the block they are gone."""

    def __init__(
        self, *, url: str, api_key: str, num_processes: int, num_adapters: int, side: OpenSide = sdk_side
    ) -> None:
        self.num_processes = num_processes
        self._url = url
        self._api_key = api_key
        self._side = side
        self._shares = list(shares(num_adapters, num_processes))
        self._clients: list[tuple[SpawnProcess, Connection]] = []

    def __enter__(self) -> LoadPool:
        context = multiprocessing.get_context("spawn")
        for share in self._shares:
            ours, theirs = context.Pipe()
            client = (theirs, self._side, self._url, self._api_key, share)
            process = context.Process(target=run_client, args=client, daemon=True)
            process.start()
            self._clients.append((process, ours))
        for _, pipe in self._clients:
            _receive(pipe)
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._clients:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()

    def processes_for(self, num_adapters: int) -> int:
        """How many processes take part with so many adapters."""
        return min(self.num_processes, num_adapters)

    def run(self, *, num_adapters: int, steps_in_flight: int, duration_s: float) -> Observed:
        """Load the server for a while; blocks."""
        starts_at = time.monotonic() + START_DELAY_S
        taking_part = self._clients[: self.processes_for(num_adapters)]
        for (_, pipe), share in zip(taking_part, shares(num_adapters, len(taking_part)), strict=True):
            pipe.send(
                Window(num_adapters=share, steps_in_flight=steps_in_flight, starts_at=starts_at, duration_s=duration_s)
            )
        total = Observed()
        for _, pipe in taking_part:
            total.extend(_receive(pipe))
        return total


def shares(total: int, parts: int) -> Iterator[int]:
    """Yields ``parts`` numbers as equal as can be that sum to ``total``."""
    for index in range(parts):
        yield total // parts + (index < total % parts)


def run_client(pipe: Connection, open_side: OpenSide, url: str, api_key: str, num_adapters: int) -> None:
    """The process: create adapters, then run the windows that come through the pipe until it closes."""
    try:
        side = open_side(url, api_key, num_adapters)
        pipe.send(None)
        while True:
            pipe.send(observe(side, pipe.recv()))
    except EOFError:
        return
    except Exception as error:
        pipe.send(RuntimeError(f"client process failed: {error!r}"))
        raise


def observe(side: Side, window: Window) -> Observed:
    """Run one window with one thread per adapter."""
    seen = [Observed() for _ in range(window.num_adapters)]
    loop = serial_loop if window.steps_in_flight == 0 else pipelined_loop
    threads = [
        threading.Thread(target=loop, args=(adapter, side, window, observed), daemon=True)
        for adapter, observed in zip(side.adapters, seen, strict=False)
    ]
    with cpu_time_of_this_process() as cpu:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    total = Observed(cpu_s=cpu[0])
    for observed in seen:
        total.extend(observed)
    return total


def serial_loop(adapter: Adapter, side: Side, window: Window, observed: Observed) -> None:
    """Await each operation before the next one is sent."""
    _sleep_until(window.starts_at)
    while time.monotonic() < window.ends_at:
        started = time.monotonic()
        adapter.forward_backward(side.batch, "cross_entropy").result(ANSWER_TIMEOUT_S)
        _note(observed.forward_backward, started, window)
        started = time.monotonic()
        adapter.optim_step(side.optimizer).result(ANSWER_TIMEOUT_S)
        _note(observed.optim_step, started, window)


def pipelined_loop(adapter: Adapter, side: Side, window: Window, observed: Observed) -> None:
    """Submit both operations of a step, keep some steps in flight, await the oldest."""
    _sleep_until(window.starts_at)
    in_flight: deque[tuple[float, Future, float, Future]] = deque()
    while time.monotonic() < window.ends_at or in_flight:
        while len(in_flight) < window.steps_in_flight and time.monotonic() < window.ends_at:
            passed_at, passed = time.monotonic(), adapter.forward_backward(side.batch, "cross_entropy")
            in_flight.append((passed_at, passed, time.monotonic(), adapter.optim_step(side.optimizer)))
        if not in_flight:
            return
        pass_started, forward_backward, step_started, optim_step = in_flight.popleft()
        forward_backward.result(ANSWER_TIMEOUT_S)
        _note(observed.forward_backward, pass_started, window)
        optim_step.result(ANSWER_TIMEOUT_S)
        _note(observed.optim_step, step_started, window)


@contextmanager
def cpu_time_of_this_process() -> Iterator[list[float]]:
    """Yields a list that holds the CPU seconds of the block once it has ended."""
    process = psutil.Process()
    before = process.cpu_times()
    used = [0.0]
    yield used
    after = process.cpu_times()
    used[0] = (after.user - before.user) + (after.system - before.system)


def _note(latencies_s: list[float], started: float, window: Window) -> None:
    now = time.monotonic()
    if now <= window.ends_at:
        latencies_s.append(now - started)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_TIMEOUT_S):
        raise RuntimeError("a client process did not answer in time")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer
