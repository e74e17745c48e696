"""Addresses and ports of this machine, for scripts that start something of their own."""

from __future__ import annotations

import socket

from twinkle.core.errors import ConfigError

ANY_PORT = 0
UNROUTED_ADDRESS = ("192.0.2.1", 9)
"""Of a network that is kept for documentation (RFC 5737); nothing is sent there."""


def find_free_port(start_port: int | None = None, retry: int = 100) -> int:
    """A port that nobody on this machine listens at just now; with ``start_port``, the first of ``retry`` from there.

    Raises:
        ConfigError: All of them are taken.
    """
    for port in [ANY_PORT] if start_port is None else range(start_port, start_port + retry):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            number: int = probe.getsockname()[1]
            return number
    raise ConfigError(f"start_port: the {retry} ports from {start_port} on are all taken; choose another start")


def find_node_ip() -> str:
    """The address under which this machine reaches others; the loopback's where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Of a datagram socket this only looks up the route.
            probe.connect(UNROUTED_ADDRESS)
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
