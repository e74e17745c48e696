"""The SDK as its users start it, in a process of its own; one that fails shows all that it said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 120.0
_STARTS = 3
"""Of 600 starts, six at a time, 2 ended by SIGABRT: one had printed all it had to, one nothing. Why is not known."""

Done = subprocess.CompletedProcess[str]


def run_tinker(*arguments: str, base_url: str, api_key: str, home: Path, python: str | Path = sys.executable) -> str:
    """Runs the ``tinker`` command and returns what it printed.

    One that the SDK aborts in its own threads is started again, twice at most: so give it nothing that must be done
    once.

    Args:
        arguments: Of the command line.
        base_url: The service.
        api_key: A tenant's key.
        home: Where it keeps its credentials; also its working directory.
        python: One that has a version of the SDK.

    Raises:
        AssertionError: It failed, or was aborted each time; holds what it said.
        subprocess.TimeoutExpired: It was killed after two minutes.
    """
    command = [python, "-m", "tinker.cli", *arguments]
    for _ in range(_STARTS):
        done = start_sdk(command, base_url=base_url, api_key=api_key, home=home)
        if done.returncode != -signal.SIGABRT:
            break
    return printed(done)


def start_sdk(
    command: Sequence[str | Path], *, base_url: str, api_key: str, home: Path, timeout_s: float = TIMEOUT_S
) -> Done:
    """Runs what uses the SDK to its end, with nothing of the caller's keys, proxies or Python paths."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.run(
        list(command),
        cwd=home,
        env=environment | {"HOME": str(home), "TINKER_BASE_URL": base_url, "TINKER_API_KEY": api_key},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def printed(done: Done) -> str:
    """What it printed, if it ended well.

    Raises:
        AssertionError: It did not; holds what it said.
    """
    said = f"--- stdout\n{done.stdout[-4000:]}\n--- stderr\n{done.stderr[-8000:]}"
    assert done.returncode == 0, f"{' '.join(map(str, done.args))} ended with {done.returncode}\n{said}"
    return done.stdout
