"""A Ray cluster of this machine as an operator starts one: `ray start`, node after node."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from harness.polling import wait_for
from harness.servers import free_port
from twinkle.core.process.parent_death import dies_with

RAY = (sys.executable, "-m", "ray.scripts.scripts")
STORE_BYTES = 100 * 2**20
LAST_WORKER_PORT = 19_999
"""Ray lends its workers those up to this one, and refuses a head that wants one of them."""
READY_S = 120.0
STOP_S = 60.0


class RayStart:
    """Nodes ``127.0.0.2``, ``127.0.0.3``, ... A context manager: none of their processes is left.

    Ray's files, and the home in which it looks for its token, are in a folder of the cluster's own, so that other
    clusters of the machine, and services that look for one, know nothing of it.
    """

    def __init__(self) -> None:
        # The path of a socket in it has at most 107 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="twinkle-ray-")
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._port = _port_of_a_head()
        self.home = Path(self._folder.name)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TWINKLE_"))}
        self.environment = {
            **clean,
            "HOME": str(self.home),
            "RAY_TMPDIR": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        """What every process needs that is to find the cluster: nothing that names it, or its token."""

    @property
    def address(self) -> str:
        """Where drivers and nodes find it."""
        return f"127.0.0.2:{self._port}"

    def make_token(self) -> None:
        """Put a token where `ray start` looks for one; clusters that are started then ask for it."""
        command = [*RAY, "get-auth-token", "--generate"]
        subprocess.run(command, env=self.environment, capture_output=True, check=True, timeout=READY_S)

    def start_node(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """`ray start` with these words: the first is the head, the others join it. Waits until it says it runs."""
        number = len(self._nodes)
        place = (
            ("--head", f"--port={self._port}", "--include-dashboard=false")
            if number == 0
            else (f"--address={self.address}",)
        )
        fixed = (f"--node-ip-address=127.0.0.{number + 2}", f"--object-store-memory={STORE_BYTES}")
        log = self.home / f"node-{number}.log"
        with log.open("wb") as out:
            node = subprocess.Popen(
                # In the foreground, for whoever started it to end it by its process and no others.
                [*RAY, "start", *place, *words, *fixed, "--block"],
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=dies_with(os.getpid()),
            )
        self._nodes.append(node)
        wait_for(
            lambda: "Ray runtime started" in log.read_text(errors="replace") or node.poll() is not None,
            what=f"node {number}",
            deadline_s=READY_S,
        )
        assert node.poll() is None, log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All of Ray's, of every node: their command lines name the folder."""
        everyone = psutil.process_iter(["cmdline"])
        return [process for process in everyone if str(self.home) in " ".join(process.info["cmdline"] or ())]

    def stop(self) -> None:
        """End the nodes, the head last."""
        for node in reversed(self._nodes):
            node.terminate()
            node.wait(STOP_S)
        self._nodes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            for process in self.processes():
                process.kill()
            self._folder.cleanup()


def _port_of_a_head() -> int:
    while (port := free_port()) <= LAST_WORKER_PORT:
        pass
    return port
