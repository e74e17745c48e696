"""What a response is made of leaves together, in order, and nothing of it is held back."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from twinkle.server.connections.gathering import GatheringTransport

if TYPE_CHECKING:
    from conftest import Api


class Sent(asyncio.Transport):
    """Notes what is sent at one go."""

    def __init__(self) -> None:
        super().__init__()
        self.sends: list[bytes] = []
        self.closed = False

    def writelines(self, pieces: Any) -> None:
        assert not self.closed, "nothing may be written to a closed connection"
        self.sends.append(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


async def test_the_head_goes_out_with_the_body_and_what_comes_alone_goes_at_the_next_turn_of_the_loop() -> None:
    sent = Sent()
    transport = GatheringTransport(sent)
    transport.write(b"head ")
    transport.write(b"body ")
    at_once = list(sent.sends)
    transport.write(b"event ")
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert at_once == [b"head body "]
    assert sent.sends == [b"head body ", b"event "]


@pytest.mark.parametrize(
    ("end", "sends"), [(GatheringTransport.close, [b"last words"]), (GatheringTransport.abort, [])]
)
async def test_closing_sends_what_is_held_and_aborting_does_not(
    end: Callable[[GatheringTransport], None], sends: list[bytes]
) -> None:
    sent = Sent()
    transport = GatheringTransport(sent)
    transport.write(b"last words")
    end(transport)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert sent.closed
    assert sent.sends == sends


async def test_what_is_held_for_a_client_that_has_gone_is_dropped() -> None:
    sent = Sent()
    transport = GatheringTransport(sent)
    transport.write(b"head")
    sent.closed = True
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert sent.sends == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by Linux's layout of tcp_info")
def test_each_response_of_the_server_is_one_packet(api: Api) -> None:
    address = urlsplit(api.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        for _ in range(20):
            connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: here\r\n\r\n")
            answer = b""
            while b"\r\n\r\n{" not in answer:
                answer += connection.recv(65536)

        assert packets_with_data(connection) == 20


def packets_with_data(connection: socket.socket) -> int:
    """``tcpi_data_segs_in`` of Linux's ``struct tcp_info``."""
    (number,) = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 152)
    return int(number)
