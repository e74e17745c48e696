"""A whole service as a child process, as an operator runs it, with the means to look into it and to break it."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import httpx
import psutil
import tinker

from harness.leftovers import close_sdk_clients, sdk_client
from harness.polling import busyness, wait_for, wait_until
from twinkle.core.clock import SystemClock
from twinkle.core.lease import ProcessIdentity
from twinkle.core.process.parent_death import dies_with
from twinkle.storage.schema import upgrade
from twinkle.storage.stores import Stores

TWINKLE = (sys.executable, "-m", "twinkle.cli")
PARTS = {
    "the API": r"twinkle\.cli server",
    "the worker": r"twinkle\.cli worker",
    "the jobs worker": r"twinkle\.cli jobs-worker",
    "housekeeping": r"twinkle\.cli housekeeping",
    "the broker": r"redis-server|valkey-server",
}
"""What the command line of each part looks like, as a regular expression."""

READY_S = 150.0
STOP_S = 120.0


@cache
def _empty_journal() -> bytes:
    """A journal with the current schema in which nothing has happened."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        upgrade(f"sqlite:///{path}")
        return path.read_bytes()


class Served:
    """``twinkle serve`` on a home of its own. A context manager: whatever happens, nothing is left running.

    ``makes_journal``: as at the very first start, and not as an earlier start left it.
    """

    def __init__(
        self,
        home: Path,
        *,
        model: str,
        model_name: str = "",
        flags: tuple[str, ...] = (),
        makes_journal: bool = False,
        **settings: str,
    ) -> None:
        self.home = home
        self._command = [*TWINKLE, "serve", "--model", model, "--home", str(home), "--port", "0", *flags]
        if model_name:
            self._command += ["--model-name", model_name]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))}
        self._environment = {
            **clean,
            "PYTHONUNBUFFERED": "1",
            "TWINKLE_LEASE_S": "4",
            "TWINKLE_THREADS": "1",
            # Who is killed again and again is soon back.
            "TWINKLE_RESTART_PAUSE_S": "1",
            **settings,
        }
        self._is_given_journal = not makes_journal and "TWINKLE_DATABASE_URL" not in settings
        self._log = home.parent / f"{home.name}-serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[tinker.ServiceClient] = []
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.logs())
        self.stop()

    def start(self) -> None:
        """Start and wait until every worker has its model."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        journal = self.home / "journal.db"
        if not journal.exists() and self._is_given_journal:
            # To migrate each takes a second.
            journal.write_bytes(_empty_journal())
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                # A run of the tests that is cut off leaves no service behind.
                preexec_fn=dies_with(os.getpid()),
            )
        try:
            self.url = wait_for(self._printed_url, what="the URL", deadline_s=READY_S)
            wait_for(self._is_ready, what="readiness", deadline_s=READY_S * busyness())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM, and time to drain."""
        process, self._process = self._process, None
        if process is None:
            return
        close_sdk_clients(self._clients)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the service did not stop within {STOP_S} s\n{self.logs()}") from None

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        assert self._process is not None
        return self._process.pid

    @contextmanager
    def beside(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """One more process of the service, ``twinkle ARGUMENTS``, that nobody restarts."""
        broker = (self.home / "broker-url").read_text().strip()
        environment = {**self._environment, "TWINKLE_REDIS_URL": broker}
        with (self.home.parent / f"{self.home.name}-{arguments[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                [*TWINKLE, *arguments], stdout=log, stderr=log, env=environment, preexec_fn=dies_with(os.getpid())
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(STOP_S)

    def create_key(self, tenant: str) -> str:
        """A new key, in the journal as ``twinkle keys create`` would make it."""
        stores = Stores.at(f"sqlite:///{self.home / 'journal.db'}", SystemClock())
        try:
            return stores.tenants.create_key(tenant, "cli")
        finally:
            stores.close()

    def client(self, tenant: str) -> tinker.ServiceClient:
        """The official SDK, logged in as ``tenant``."""
        client = sdk_client(self.url, self.create_key(tenant))
        self._clients.append(client)
        return client

    def query(self, sql: str, *parameters: object) -> list[tuple]:
        """Look into the journal, beside the service."""
        with sqlite3.connect(self.home / "journal.db", timeout=10) as connection:
            return connection.execute(sql, parameters).fetchall()

    def processes(self, pattern: str) -> list[psutil.Process]:
        """Those of the service whose command line the regular expression is found in."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            # What ended a moment ago may still be listed.
            with suppress(psutil.NoSuchProcess):
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
        return found

    def part(self, name: str) -> psutil.Process:
        """The one process of one of the ``PARTS``, as soon as there is one."""
        return wait_for(lambda: self.processes(PARTS[name]), what=name)[0]

    def engine_pid(self, mesh: str = "default") -> int:
        """The process that holds the mesh's lease and its device."""
        holder = wait_for(lambda: self._holder(mesh), what="a lease holder", deadline_s=READY_S)
        return holder.pid

    def kill_engine(self, mesh: str = "default") -> None:
        """SIGKILL to the process that owns the device."""
        os.kill(self.engine_pid(mesh), signal.SIGKILL)

    @contextmanager
    def standing_still(self, process: int | psutil.Process) -> Iterator[None]:
        """A process of the service that is stopped, and goes on afterwards where it still is.

        Not in the midst of a write: SQLite's lock would stand still with it, and everybody else would wait for it.
        """
        of_service = psutil.Process(process) if isinstance(process, int) else process
        try:
            with closing(sqlite3.connect(self.home / "journal.db", timeout=60, isolation_level=None)) as journal:
                journal.execute("BEGIN IMMEDIATE")
                of_service.suspend()
                # The signal takes its time: a thread that still ran would take the lock that is let go here.
                wait_until(lambda: _stands_still(of_service), what="all threads of a process stand still")
                journal.execute("ROLLBACK")
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                of_service.resume()

    def follower_pid(self, mesh: str = "default") -> int:
        """The process of the mesh's second rank."""
        module = "twinkle.workers.ranks.follower"
        children = psutil.Process(self.engine_pid(mesh)).children()
        return next(child.pid for child in children if module in child.cmdline())

    def logs(self) -> str:
        """What everybody has said, for a failed test."""
        files = sorted((self.home / "logs").glob("*.log"))
        tails = (f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in files)
        return "\n".join([self._log.read_text(errors="replace"), *tails])

    def _holder(self, mesh: str) -> ProcessIdentity | None:
        rows = self.query("SELECT owner FROM mesh WHERE name = ?", mesh)
        holder = ProcessIdentity.parse(rows[0][0]) if rows and rows[0][0] else None
        return None if holder is None or holder.is_known_dead() else holder

    def _printed_url(self) -> str:
        assert self._process is not None
        text = self._log.read_text(errors="replace")
        assert self._process.poll() is None, text
        words = [word for word in text.split() if word.startswith("http://")]
        return words[0] if words else ""

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.logs()
        try:
            # Reading certificates, of which HTTP has none, takes 40 ms of CPU time from who starts, each time.
            return httpx.get(f"{self.url}/api/v1/readyz", timeout=2, verify=False).status_code == 200
        except httpx.TransportError:
            return False


def _stands_still(process: psutil.Process) -> bool:
    """Whether each of its threads has heard of SIGSTOP; one that has ended meanwhile has not."""
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state != "T":
            return False
    return True
