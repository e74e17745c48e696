"""Attacks of nobody in particular: heads without end, long URLs, idle connections, answers that are not read."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

from harness.polling import wait_for

if TYPE_CHECKING:
    from conftest import Api, ServeApi

HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: here\r\n\r\n"
CHUNKED = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
MOST = 12


@pytest.fixture(scope="module")
def guarded(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """A served app with a narrow door."""
    limits = {
        "max_connections": MOST,
        "max_url_bytes": 1000,
        "max_head_bytes": 4000,
        "head_timeout_s": 0.4,
        "send_timeout_s": 0.2,
    }
    with serve_api(make_database_url("sqlite"), **limits) as served:
        yield served


def connect(api: Api) -> socket.socket:
    """A connection."""
    address = urlsplit(api.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def all_of(connection: socket.socket) -> bytes:
    """What is sent until the other side ends."""
    answer = b""
    try:
        while piece := connection.recv(65536):
            answer += piece
    except ConnectionError:
        pass
    return answer


def flood(connection: socket.socket, piece: bytes) -> bytes:
    """Send the same again and again until the server ends it; what it said."""
    try:
        for _ in range(2000):
            connection.sendall(piece)
    except ConnectionError:
        pass
    else:
        raise AssertionError("the server took all of it")
    return all_of(connection)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /api/v1/healthz HTTP/1.1\r\n", b"a: b\r\n" * 500),
        (b"GET /api/v1/healthz HTTP/1.1\r\nendless: ", b"a" * 4000),
        (b"GET /api/v1/healthz HTTP/1.1\r\nendless", b"a" * 4000),
        (b"POST /api/v1/telemetry HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nendless: ", b"a" * 4000),
        (b"POST /api/v1/telemetry HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a" * 4000),
        (b"GET /", b"a" * 4000),
    ],
    ids=["headers", "value", "name", "trailer", "chunk extension", "url"],
)
def test_what_has_no_end_is_ended(guarded: Api, begin: bytes, piece: bytes) -> None:
    with connect(guarded) as connection:
        connection.sendall(begin)
        flood(connection, piece)

    assert httpx.get(f"{guarded.url}/api/v1/healthz").status_code == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: here\r\n\r\n", b"414"),
        (b"GET /api/v1/livez?mesh=" + b"a" * 2000 + b" HTTP/1.1\r\nHost: here\r\n\r\n", b"414"),
        (b"GET /api/v1/healthz HTTP/1.1\r\nHost: here\r\na: " + b"a" * 5000 + b"\r\n\r\n", b"431"),
        (b"GET /api/v1/healthz HTTP/1.1\r\nHost: here\r\na: " + b"a" * 3000 + b"\r\n\r\n", b"200"),
        (CHUNKED + b"0\r\na: " + b"a" * 5000 + b"\r\n\r\n", b"431"),
        (CHUNKED + b"0\r\na: " + b"a" * 3000 + b"\r\n\r\n", b"401"),
        (b"GET /api/v1/" + b"a" * 900 + b" HTTP/1.1\r\nHost: here\r\n\r\n", b"404"),
    ],
    ids=["path", "query", "head", "head that fits", "trailer", "trailer that fits", "path that fits"],
)
def test_the_limits_of_a_head_are_said(guarded: Api, request_bytes: bytes, status: bytes) -> None:
    with connect(guarded) as connection:
        connection.sendall(request_bytes)
        answer = connection.recv(65536)

    assert answer.split(b" ")[1] == status, answer


@pytest.mark.parametrize(("num_headers", "status"), [(3, b"200"), (5, b"431")])
def test_a_head_in_pieces_has_the_limit_of_one_that_comes_whole(guarded: Api, num_headers: int, status: bytes) -> None:
    pieces = [
        b"GET /api/v1/healthz HTTP/1.1\r\nHost: here\r\n",
        *[b"a: " + b"a" * 900 + b"\r\n"] * num_headers,
        b"\r\n",
    ]
    with connect(guarded) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        answer = connection.recv(65536)

    assert answer.split(b" ")[1] == status, answer


@pytest.mark.parametrize("begin", [b"", b"GET /api/v1/heal", HEALTH[:-2]], ids=["nothing", "a line", "headers"])
def test_who_sends_no_whole_head_is_not_waited_for(guarded: Api, begin: bytes) -> None:
    with connect(guarded) as connection:
        connection.sendall(begin)
        answer = all_of(connection)

    assert b" 408 " in answer


def test_a_kept_connection_that_begins_a_request_is_not_waited_for_either(guarded: Api) -> None:
    with connect(guarded) as connection:
        connection.sendall(HEALTH)
        while b"}" not in connection.recv(65536):
            pass
        connection.sendall(HEALTH[:20])

        assert b" 408 " in all_of(connection)


def test_idle_connections_make_room_for_who_asks_and_are_counted(guarded: Api) -> None:
    door = guarded.server.door
    before = door.num_turned_away
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(guarded)) for _ in range(3 * MOST)]
        answers = [httpx.get(f"{guarded.url}/api/v1/healthz").status_code for _ in range(5)]

        assert answers == [200] * 5
        assert door.num_open <= MOST
        assert door.num_turned_away - before >= 2 * MOST
        assert idle
    wait_for(lambda: door.num_open == 0, what="everybody to have left")


def test_requests_in_progress_are_not_ended_for_newcomers(guarded: Api) -> None:
    key = guarded.new_key()
    slow = (
        b"POST /api/v1/telemetry HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\nX-API-Key: "
        + key.encode()
        + b"\r\n\r\n"
    )
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(guarded)) for _ in range(MOST)]
        for connection in busy:
            connection.sendall(slow)
        wait_for(lambda: len(guarded.server.door._idle) == 0, what="all to be in progress")
        with connect(guarded) as newcomer:
            refused = all_of(newcomer)
        for connection in busy:
            connection.sendall(b"12345")
        answers = [connection.recv(65536) for connection in busy]

    assert b" 503 " in refused and b"retry-after: 1" in refused
    assert all(b" 200 " in answer for answer in answers)


def test_of_one_address_only_its_own_share_of_connections_is_taken(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("sqlite"), max_connections=30, max_connections_per_address=4) as api:
        address = urlsplit(api.url)
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(connect(api))
            other = stack.enter_context(socket.socket())
            other.bind(("127.0.0.2", 0))
            other.connect((address.hostname, address.port))
            other.settimeout(20)
            other.sendall(HEALTH)
            answer = other.recv(65536)

            assert b" 200 " in answer
            assert api.server.door.num_open <= 5


def test_who_reads_nothing_of_an_answer_is_let_go(guarded: Api) -> None:
    door = guarded.server.door
    wait_for(lambda: door.num_open == 0, what="nobody to be in")
    with connect(guarded) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: here\r\n\r\n"
        connection.sendall(ask * 60)

        wait_for(lambda: door.num_open == 0, what="the connection to be ended")


def test_what_a_thousand_connections_took_is_given_back_when_they_have_left(guarded: Api) -> None:
    freed = guarded.state().common.freed
    before = freed.num_given_back
    for _ in range(1025):
        connect(guarded).close()

    wait_for(lambda: freed.num_given_back > before, what="memory to be given back")
