"""A real HTTP server that answers as it is told: for the answers that a healthy service cannot be made to give."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    path: str
    content: bytes
    method: str = field(default="POST", compare=False)
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Their names in lower case."""


@dataclass(frozen=True)
class Reply:
    """What to answer; ``None`` for a status hangs up without a word."""

    status: int | None
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)


class ScriptedServer:
    """Answers each request with what ``reply`` says. A context manager."""

    def __init__(self, reply: Callable[[Seen], Reply]) -> None:
        self.seen: list[Seen] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                seen = Seen(self.path, content, self.command, headers)
                script.seen.append(seen)
                answer = reply(seen)
                if answer.status is None:
                    self.close_connection = True
                    return
                content = json.dumps(answer.body).encode()
                self.send_response(answer.status)
                for name, value in {**answer.headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_DELETE = do_POST  # noqa: N815 - the names are http.server's

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
