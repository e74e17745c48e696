"""What bodies, results and connections took is given back to the system once it is much, however it was taken."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import pytest

from harness.calls import PROTOBUF
from harness.polling import wait_for
from twinkle.cli.embedded.stack import GIVES_MEMORY_BACK
from twinkle.server.answering.held_results import HeldResults
from twinkle.server.connections.free_memory import FreedMemory, give_back_free_memory
from twinkle.server.receiving.body import ByteBudget, Held

if TYPE_CHECKING:
    from conftest import Api

MIB = 2**20
BODY = bytes(190_000)


LETS_GO_IN_THREADS = """
import ctypes, threading
from concurrent.futures import ThreadPoolExecutor
def resident(): return 4096 * int(open("/proc/self/statm").read().split()[1])
def work(num_bytes):
    blocks = [bytearray(num_bytes) for _ in range(24 * 2**20 // num_bytes)]
    together.wait()
together = threading.Barrier(3)
with ThreadPoolExecutor(3) as threads:
    was = resident()
    for num_bytes in (24 * 2**20, 2**20):
        list(threads.map(work, [num_bytes] * 3))
    ctypes.CDLL(None).malloc_trim(0)
    print(resident() - was)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc's allocator")
def test_what_threads_let_go_of_leaves_the_process_as_the_stack_starts_it() -> None:
    command = [sys.executable, "-S", "-c", LETS_GO_IN_THREADS]
    kept = subprocess.run(command, env={**os.environ, **GIVES_MEMORY_BACK}, capture_output=True, text=True, check=True)

    assert int(kept.stdout) < MIB / 2


async def test_it_is_given_back_once_for_all_that_was_let_go_of_together_and_not_for_little() -> None:
    freed = FreedMemory(pause_s=0)
    freed.note(MIB - 1)
    await asyncio.sleep(0.01)
    little = freed.num_given_back
    for _ in range(100):
        freed.note(MIB)
    await asyncio.to_thread(wait_for, lambda: freed.num_given_back > 0, what="memory to be given back")

    assert (little, freed.num_given_back) == (0, 1)


async def test_what_is_let_go_of_last_is_given_back_too_once_nothing_more_is() -> None:
    freed = FreedMemory(pause_s=0)
    freed.note(64 * MIB)
    await asyncio.to_thread(wait_for, lambda: freed.num_given_back == 1, what="much to be given back")
    freed.note(5 * MIB)

    await asyncio.to_thread(wait_for, lambda: freed.num_given_back == 2, what="the rest to be given back")


async def test_what_is_let_go_of_little_by_little_is_given_back_only_once_it_is_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    begun_at, passed = loop.time(), 0.0
    monkeypatch.setattr(loop, "time", lambda: begun_at + passed)
    freed = FreedMemory(pause_s=10)
    given_back = []
    for _ in range(17):
        freed.note(MIB)
        given_back.append(freed.num_given_back)
        passed += 9
        for _ in range(3):
            await asyncio.sleep(0)

    assert given_back == [0] * 16 + [1]


@pytest.mark.parametrize("of", ["bodies", "results"])
async def test_bodies_and_results_count_when_they_are_let_go_of(of: str) -> None:
    freed = FreedMemory(pause_s=0)
    budget = ByteBudget(2**40, freed=freed) if of == "bodies" else HeldResults(2**40, freed).budget
    held = Held([budget])
    held.take(64 * MIB)
    await asyncio.sleep(0)
    while_held = freed.num_given_back
    held.release()

    await asyncio.to_thread(wait_for, lambda: freed.num_given_back == 1, what="memory to be given back")
    assert while_held == 0


async def test_what_requests_left_in_cycles_goes_too() -> None:
    class Broken(Exception):
        pass

    error = Broken()
    error.args = (error,)
    left = weakref.ref(error)
    gc.disable()
    try:
        del error
        was_left = left() is not None
        give_back_free_memory()
    finally:
        gc.enable()

    assert was_left and left() is None


def test_a_served_app_gives_back_what_many_bodies_took(api: Api) -> None:
    freed = api.state().common.freed
    before = freed.num_given_back
    with api.http(api.new_key()) as client:
        refused = [client.post("/forward_backward", content=BODY, headers=PROTOBUF) for _ in range(100)]

    assert {answer.status_code for answer in refused} == {400}
    wait_for(lambda: freed.num_given_back > before, what="memory to be given back")
