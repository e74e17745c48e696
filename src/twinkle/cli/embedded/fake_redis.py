"""A Redis server in Python, for machines without a binary: ``python -m twinkle.cli.embedded.fake_redis redis.conf``.

``fakeredis`` does the work. Two things are added: Nagle's algorithm is off (with it a round trip waits for a delayed
acknowledgement, 93 ms instead of 11), and a connection gets nowhere before it has shown the password, which fakeredis
itself checks only when a client offers one. It keeps nothing, so it needs no orderly end: SIGTERM just ends it.
"""

from __future__ import annotations

import hmac
import select
import shlex
import socket
import sys
import time
from pathlib import Path

from fakeredis import TcpFakeServer
from fakeredis._clients import _tcp_server

# How long a pushed message (pub/sub, a blocking pop) may wait for the handler to look: 1 ms costs 16 % of a core.
_POLL_INTERVAL_S = 0.005
_LOGIN_TIMEOUT_S = 10.0
_LOGIN_BYTES = 4096
_REFUSAL = b"-NOAUTH Authentication required.\r\n"


class PasswordFirst(_tcp_server.TCPFakeRequestHandler):
    """Hangs up on whoever does not begin with ``AUTH`` or ``HELLO ... AUTH`` and the right password."""

    disable_nagle_algorithm = True
    password = b""

    def handle(self) -> None:
        """Serve one connection."""
        first = _peek_command(self.connection)
        if hmac.compare_digest(_offered_password(first), self.password):
            super().handle()
        else:
            self.connection.sendall(_REFUSAL)


def _peek_command(connection: socket.socket) -> list[bytes]:
    """The words of the first command, left unread for the handler; empty when none comes in time."""
    deadline = time.monotonic() + _LOGIN_TIMEOUT_S
    while (remaining := deadline - time.monotonic()) > 0:
        if not select.select([connection], [], [], remaining)[0]:
            break
        lines = connection.recv(_LOGIN_BYTES, socket.MSG_PEEK).split(b"\r\n")
        count = lines[0].removeprefix(b"*")
        if lines == [b""] or not count.isdigit():
            break
        words = lines[2::2]
        if len(words) >= int(count) and len(lines) > 2 * int(count):
            return words[: int(count)]
        time.sleep(_POLL_INTERVAL_S)
    return []


def _offered_password(words: list[bytes]) -> bytes:
    verb = words[0].upper() if words else b""
    if verb == b"AUTH" and len(words) in (2, 3):
        return words[-1]
    options = [word.upper() for word in words]
    if verb == b"HELLO" and b"AUTH" in options and options.index(b"AUTH") + 2 < len(words):
        return words[options.index(b"AUTH") + 2]
    return b""


def serve(config: Path) -> None:
    """Serve for ever on the address of a ``redis.conf``."""
    lines = (shlex.split(line) for line in config.read_text().splitlines())
    options = {words[0]: words[1] for words in lines if len(words) == 2}
    PasswordFirst.password = options["requirepass"].encode()
    _tcp_server._POLL_INTERVAL = _POLL_INTERVAL_S
    server = TcpFakeServer((options["bind"], int(options["port"])))
    server.RequestHandlerClass = PasswordFirst
    server.daemon_threads = True
    server.fake_server.config[b"requirepass"] = PasswordFirst.password
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
