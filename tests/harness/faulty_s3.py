"""A proxy in front of an S3 server that refuses, delays, tears or changes what passes through, as a test says."""

from __future__ import annotations

import http.client
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class FaultyS3:
    """Set :attr:`refusals`, :attr:`delay_s`, :attr:`torn_writes` or :attr:`lies`; else everything passes unchanged."""

    def __init__(self, endpoint: str) -> None:
        self.refusals = 0
        self.delay_s = 0.0
        self.torn_writes = 0
        self.lies = False
        """Whether what is read differs in one byte from what was written."""
        self._target = urlsplit(endpoint).netloc
        self._server = _Server(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        faults = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if faults.delay_s:
                    threading.Event().wait(faults.delay_s)
                if faults.refusals > 0:
                    faults.refusals -= 1
                    self._answer(503, b"<Error><Code>SlowDown</Code></Error>", {})
                    return
                if self.command == "PUT" and faults.torn_writes > 0:
                    faults.torn_writes -= 1
                    body = body[: len(body) // 2]
                connection = http.client.HTTPConnection(faults._target, timeout=30)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
                connection.request(self.command, self.path, body=body, headers={**headers, "Host": faults._target})
                response = connection.getresponse()
                answered = response.read()
                if self.command == "GET" and faults.lies and response.status < HTTPStatus.MULTIPLE_CHOICES and answered:
                    answered = answered[:-1] + bytes([answered[-1] ^ 1])
                self._answer(response.status, answered, dict(response.getheaders()))
                connection.close()

            def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                size = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
                self.send_header("Content-Length", size)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                return

        return Handler
