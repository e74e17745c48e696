"""A worker's time-bounded, exclusive right to a mesh. Its epoch fences every write."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right of ``owner`` to the mesh until ``expires_at`` (Unix seconds). A higher epoch ends it at once."""

    mesh: str
    owner: str
    epoch: int
    expires_at: float


@dataclass(frozen=True)
class ProcessIdentity:
    """Names one process for ever: no other, not even one with the same recycled pid, has the same identity."""

    host: str
    pid_namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The identity of this process."""
        pid = os.getpid()
        return cls(_host(), _pid_namespace(), pid, _start_ticks(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Read what ``str()`` wrote; ``None`` for anything else."""
        parts = text.split("|")
        if len(parts) != 4 or not parts[2].isdigit() or not parts[3].isdigit():
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.host}|{self.pid_namespace}|{self.pid}|{self.start_ticks}"

    def is_known_dead(self) -> bool:
        """Whether this process certainly runs no more: it lived here, and the kernel no longer knows it.

        False means "alive or cannot tell" (another host, another pid namespace, no /proc): wait for its lease to end.
        """
        if (self.host, self.pid_namespace) != (_host(), _pid_namespace()) or not self.pid_namespace:
            return False
        return _start_ticks(self.pid) != self.start_ticks


def _host() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    suffix = boot_id.read_text().strip()[:8] if boot_id.exists() else ""
    return f"{socket.gethostname()}.{suffix}"


def _pid_namespace() -> str:
    link = Path("/proc/self/ns/pid")
    return os.readlink(link) if link.is_symlink() else ""


def _start_ticks(pid: int) -> int | None:
    """The start time of a live process in clock ticks since boot; ``None`` when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
