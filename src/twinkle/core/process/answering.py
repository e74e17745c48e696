"""Whether another process can be reached, asked before a library is that would try for minutes."""

from __future__ import annotations

import socket


def is_answered(address: str, *, timeout_s: float) -> bool:
    """Whether somebody listens at ``HOST:PORT``. Blocks for so long at most."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False
