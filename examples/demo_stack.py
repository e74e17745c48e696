"""The embedded stack as a child of the demo: started, watched, and always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import httpx

TWINKLE = (sys.executable, "-m", "twinkle.cli")
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
LOG_LINES_SHOWN = 15


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to look at."""


class Stack:
    """`twinkle serve` in a process group of its own.

    A context manager: however the block is left, the service gets SIGTERM, has time to drain, and is killed with its
    whole group when it does not end. A group of its own keeps the terminal's Ctrl-C away from it, so that it stops
    once, in order, when the demo says so.
    """

    def __init__(self, model: Path, home: Path, *, with_flower: bool = True) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.log_file = home.parent / "serve.log"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.flower_url = f"http://127.0.0.1:{free_port()}"
        self.flower_password_file = home / "flower-password"
        self._model = model
        self._with_flower = with_flower
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stack:
        port = self.url.rpartition(":")[2]
        flower_port = self.flower_url.rpartition(":")[2]
        command = [*TWINKLE, "serve", "--model", str(self._model), "--home", str(self.home), "--port", port]
        if self._with_flower:
            command += ["--flower", "--flower-port", flower_port]
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Blocks until the API answers and a worker has the model loaded.

        Raises:
            DemoError: The service ended, or is not ready in time.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                # 503 until the worker has loaded the model; healthz would only say that the API listens.
                # Certificates, of which HTTP has none, are not read: that takes 40 ms of CPU time from who starts.
                if httpx.get(f"{self.url}/api/v1/readyz", timeout=2.0, verify=False).status_code < 500:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(POLL_S)
        raise DemoError(f"the service was not ready within {READY_TIMEOUT_S:.0f} s{self._log_end()}")

    def check_alive(self) -> None:
        """Raises DemoError, with the end of the log, when the service has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise DemoError(f"the service ended with exit code {code}{self._log_end()}")

    def create_key(self, tenant: str) -> str:
        """Returns a new API key for the tenant, made with the command line as an operator would."""
        command = [*TWINKLE, "keys", "create", "--tenant", tenant, "--home", str(self.home)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        lines = done.stdout.split()
        if done.returncode != 0 or not lines:
            raise DemoError(f"no API key for tenant {tenant}: {done.stderr.strip() or 'the command printed nothing'}")
        return lines[-1]

    def wait(self) -> None:
        """Blocks until the service ends by itself."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """Ends the service and everything it started; a second Ctrl-C while it drains kills at once."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.poll() is None:
                process.terminate()
                process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            print(f"the service did not drain; killing it (its log is {self.log_file})", file=sys.stderr)
        finally:
            kill_group(process.pid)
            process.wait()

    def _log_end(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join([f"; the end of {self.log_file}:", *lines])


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Turns SIGTERM into what Ctrl-C does; a handler of signals."""
    raise KeyboardInterrupt


def kill_group(group: int) -> None:
    """Kills what is left of a process group, if anything is."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended, as it should


def free_port() -> int:
    """Returns a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
