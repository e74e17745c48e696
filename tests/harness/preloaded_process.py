"""The process that `harness.preloaded` forks scripts from. It imports libraries, and nothing of ours.

Each line of standard input orders a process, as JSON; the answer, a line each, is its exit code, or ``null`` where it
took too long.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from typing import Any

LIBRARIES = ("torch", "transformers.modeling_utils", "peft", "safetensors.torch", "modelscope")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """In the process that was started until standard input ends; in each that it forks until its script does."""
    del sys.path[0]  # our folder, whose names no library means
    gc.disable()
    for library in LIBRARIES:
        importlib.import_module(library)
    assert len(os.listdir("/proc/self/task")) == 1, "what is forked has one thread: others would hold their locks"
    # The collector would touch, and so copy, all that processes share.
    gc.freeze()
    gc.enable()
    if order := _serve():
        _become(order)
        runpy.run_path(order["script"], run_name="__main__")


def _serve() -> dict[str, Any] | None:
    """What to become in a process that was forked; ``None`` at the end."""
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return told["order"]
        print(json.dumps(_end_of(pid, told["timeout_s"])), flush=True)
    return None


def _end_of(pid: int, timeout_s: float) -> int | None:
    """Wait for it, or end it when the time is over."""
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        _, status = os.waitpid(pid, 0)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status)


def _too_late(*_: object) -> None:
    raise TimeoutError


def _become(order: dict[str, Any]) -> None:
    """What a fresh interpreter would be that was started with this script."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = [order["script"], *order["arguments"]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(order["script"])))
    output = os.open(order["output"], os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the process


if __name__ == "__main__":
    main()
