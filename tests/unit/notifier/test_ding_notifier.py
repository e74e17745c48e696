"""Messages to DingTalk, against a server that checks them as DingTalk does."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from twinkle.core.errors import ConfigError
from twinkle.notifier import DingNotifier, NotToldError

SECRET = "SEC-of-a-test"
NOW = 1_700_000_000.25


@dataclass
class Robot:
    url: str = ""
    status: int = 200
    received: list[dict[str, Any]] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=lambda: {"errcode": 0, "errmsg": "ok"})


@pytest.fixture
def robot() -> Iterator[Robot]:
    made = Robot()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            made.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            made.queries.append({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})
            body = json.dumps(made.answer).encode()
            self.send_response(made.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}/robot/send?access_token=hidden"
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_message_is_sent_as_markdown_under_its_first_line(robot: Robot) -> None:
    assert DingNotifier(robot.url)("\n## It failed\nat step 3")["errmsg"] == "ok"
    assert robot.received == [
        {"msgtype": "markdown", "markdown": {"title": "It failed", "text": "\n## It failed\nat step 3"}}
    ]
    assert robot.queries == [{"access_token": "hidden"}]


def test_a_message_is_signed_with_the_robots_secret(robot: Robot) -> None:
    DingNotifier(robot.url, SECRET, clock=lambda: NOW)("done")
    (query,) = robot.queries
    wanted = hmac.new(SECRET.encode(), f"1700000000250\n{SECRET}".encode(), hashlib.sha256).digest()
    assert query["timestamp"] == "1700000000250" and base64.b64decode(query["sign"]) == wanted
    assert query["access_token"] == "hidden"


def test_what_dingtalk_refuses_is_an_error_that_keeps_the_token(robot: Robot) -> None:
    robot.answer = {"errcode": 310000, "errmsg": "sign not match"}
    with pytest.raises(NotToldError, match="310000 sign not match"):
        DingNotifier(robot.url)("x")
    robot.status = 500
    for url in (robot.url, "http://127.0.0.1:9/robot/send?access_token=hidden"):
        with pytest.raises(NotToldError) as caught:
            DingNotifier(url, timeout=2)("x")
        assert "hidden" not in str(caught.value)
    assert "hidden" not in repr(DingNotifier(robot.url))
    with pytest.raises(ConfigError, match="ding_url"):
        DingNotifier("")


def test_a_message_that_is_too_long_keeps_its_end(robot: Robot) -> None:
    DingNotifier(robot.url)("start" + "x" * 20_000 + "the reason")
    assert robot.received[0]["markdown"]["text"].endswith("the reason")
    assert len(robot.received[0]["markdown"]["text"]) < 20_000


def test_a_run_that_ends_by_an_error_tells_the_group(robot: Robot) -> None:
    code = (
        "import sys, twinkle; from twinkle.notifier import DingNotifier;"
        " twinkle.initialize(name='night', notifier=DingNotifier(sys.argv[1])); raise ValueError('no loss')"
    )
    done = subprocess.run([sys.executable, "-c", code, robot.url], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ends with ValueError: no loss" in robot.received[0]["markdown"]["text"]


def test_a_group_that_cannot_be_told_changes_nothing_about_how_a_run_ends() -> None:
    code = (
        "import twinkle; from twinkle.notifier import DingNotifier;"
        " twinkle.initialize(notifier=DingNotifier('http://127.0.0.1:9/x')); raise ValueError('no loss')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: no loss" in done.stderr
    assert "the notifier was not reached: DingTalk was not told" in done.stderr
