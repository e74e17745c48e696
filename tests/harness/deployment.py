"""The service as separate processes, each started by hand: what an orchestrator runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from harness.polling import wait_for
from harness.servers import free_port
from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.lease import ProcessIdentity
from twinkle.storage.database import Database
from twinkle.storage.stores import Stores

TWINKLE = (sys.executable, "-m", "twinkle.cli")
READY_S = 150.0
STOP_S = 40.0


class Deployment:
    """The processes of a deployment and their logs. Nobody restarts them."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._folder = folder
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))
        } | {"TWINKLE_THREADS": "1", **settings}
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.database = Database(settings["TWINKLE_DATABASE_URL"])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``twinkle ARGUMENTS`` with a log under the name."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([*TWINKLE, *arguments], stdout=log, stderr=log, env=self._environment)
        self.processes[name] = process
        return process

    def start_server(self) -> None:
        self.start("server", "server", "--port", str(self._port))

    def await_ready(self) -> None:
        """Wait until the API has seen a worker for every mesh."""
        wait_for(self.is_ready, what="readiness", deadline_s=READY_S)

    def is_ready(self) -> bool:
        try:
            # Reading certificates, of which HTTP has none, takes 40 ms of CPU time from who starts, each time.
            return httpx.get(f"{self.url}/api/v1/readyz", timeout=2, trust_env=False, verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def create_key(self, tenant: str) -> str:
        """A new key, in the journal as ``twinkle keys create`` would make it."""
        stores = Stores.at(self._environment["TWINKLE_DATABASE_URL"], SystemClock())
        try:
            return stores.tenants.create_key(tenant, "cli")
        finally:
            stores.close()

    def query(self, sql: str) -> list[tuple]:
        """Look into the journal, beside the service; nothing is seen while the database is away."""
        for _ in range(2):  # a connection from before a restart fails once
            try:
                return self.database.read(sql)
            except StorageUnavailable:
                continue
        return []

    def holder(self) -> tuple[int, ProcessIdentity] | None:
        """The epoch of the mesh's lease, and the live process that holds it."""
        rows = self.query("SELECT epoch, owner FROM mesh")
        identity = ProcessIdentity.parse(rows[0][1]) if rows and rows[0][1] else None
        return None if identity is None or identity.is_known_dead() else (rows[0][0], identity)

    def name_of(self, pid: int) -> str:
        """The deployment's process that is this one, or whose child it is."""
        parents = {pid, *(parent.pid for parent in psutil.Process(pid).parents())}
        return next(name for name, process in self.processes.items() if process.pid in parents)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(STOP_S)
        self.database.close()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-5000:]}" for path in self._folder.glob("*.log"))
