"""The servers under measurement as child processes: started, made ready, always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx
import psutil

HERE = Path(__file__).parent
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.1
LOG_BYTES_SHOWN = 2000


class ChildServer(ABC):
    """A server in a process group of its own. A context manager: it is ready inside the block and gone after it."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.log_file = home / f"{type(self).__name__.lower()}.out"
        self.url = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The command line to start."""

    @abstractmethod
    def ready_path(self) -> str:
        """Answers 200 once the server can do its work."""

    def environment(self) -> Mapping[str, str]:
        """Variables on top of this process's own."""
        return {}

    @property
    def port(self) -> str:
        """Where it listens."""
        return self.url.rpartition(":")[2]

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None, "only inside the block"
        return self._process.pid

    def __enter__(self) -> Self:
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                list(self.command()),
                env={**os.environ, **self.environment()},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM, time to drain, and SIGKILL for the group of whoever does not end."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds used so far by each part of the server."""
        return {"server": tree_cpu_s(psutil.Process(self.pid))}

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                # Reading certificates, of which HTTP has none, would take a quarter of a core from who starts.
                answer = httpx.get(self.url + self.ready_path(), timeout=2.0, trust_env=False, verify=False)
                if answer.status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        tail = self.log_file.read_bytes()[-LOG_BYTES_SHOWN:].decode(errors="replace")
        raise RuntimeError(f"{type(self).__name__} did not become ready:\n{tail}")


class TwinkleService(ChildServer):
    """``twinkle serve``: broker, API, worker and housekeeping, with everything in ``home``."""

    def __init__(
        self, home: Path, *, model: str, engine: str = "transformers", settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(home)
        self._model = model
        self._engine = engine
        self._settings = dict(settings or {})

    def command(self) -> Sequence[str]:
        flags = ("--home", str(self.home), "--port", self.port, "--model", self._model, "--engine", self._engine)
        return (sys.executable, "-m", "twinkle.cli", "serve", *flags)

    def ready_path(self) -> str:
        return "/api/v1/readyz"

    def environment(self) -> Mapping[str, str]:
        return {"TWINKLE_LOG_LEVEL": "WARNING", **self._settings}

    def create_key(self, tenant: str = "bench") -> str:
        """A fresh API key."""
        answer = subprocess.run(
            (sys.executable, "-m", "twinkle.cli", "keys", "create", "--tenant", tenant, "--home", str(self.home)),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return answer.stdout.split()[-1]

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory per process of the stack, what they started included."""
        used: defaultdict[str, int] = defaultdict(int)
        for child in psutil.Process(self.pid).children():
            for member in (child, *child.children(recursive=True)):
                try:
                    used[_role_of(child)] += member.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
        return dict(used)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds per process of the stack, what they started included."""
        used: defaultdict[str, float] = defaultdict(float)
        for child in psutil.Process(self.pid).children():
            used[_role_of(child)] += tree_cpu_s(child)
        return dict(used)


class NothingServer(ChildServer):
    """The same protocol with nothing behind it; see ``nothing_server.py``."""

    def command(self) -> Sequence[str]:
        return (sys.executable, str(HERE / "nothing_server.py"), "--port", self.port)

    def ready_path(self) -> str:
        return "/api/v1/healthz"


def end_in_order_on_sigterm() -> None:
    """Make SIGTERM leave all blocks on its way out, so that no server stays behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def tree_cpu_s(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and everything below it; those that have just ended do not count."""
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def free_port() -> int:
    """Returns a port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _role_of(process: psutil.Process) -> str:
    words = process.cmdline()
    roles = {"server": "api", "worker": "worker", "housekeeping": "housekeeping", "flower": "flower"}
    is_broker = any(name in " ".join(words) for name in ("redis", "valkey"))
    return next((roles[word] for word in words if word in roles), "broker" if is_broker else "other")
