"""Room on the disks: below one mark nothing new is begun, below another nothing is done but deleting and reading."""

from __future__ import annotations

from twinkle.core.errors import DiskFull
from twinkle.server.scopes import may_go_on, only_ends_or_reads
from twinkle.storage.disks import Disks


def check_room(disks: Disks, method: str, path: str) -> None:
    """Let a request pass that there is room for.

    Raises:
        DiskFull: There is none.
    """
    if not disks.is_low:
        return
    if disks.is_critical and not only_ends_or_reads(method, path):
        raise DiskFull("the server has no room left on its disk; only reading and deleting go on until it has")
    if not may_go_on(method, path):
        raise DiskFull(
            "the server has little room left on its disk; what was accepted goes on, and nothing new is begun:"
            " delete what you need no longer, or send this again later"
        )
