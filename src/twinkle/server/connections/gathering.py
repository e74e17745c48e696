"""A response's head goes out together with its body: one system call, one packet, one wake-up of the client."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class GatheringTransport(asyncio.Transport):
    """Holds a write until the next one, or until the loop comes round: what is written at one go is sent at one go."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: bytes | None = None
        self._flushing: asyncio.Handle | None = None

    def write(self, data: Any) -> None:
        """Send soon, in order."""
        if self._held is None:
            self._held = data
            self._flushing = self._loop.call_soon(self.flush)
        else:
            self._send([self._take(), data])

    def flush(self) -> None:
        """Send what is held."""
        if self._held is not None:
            self._send([self._take()])

    def close(self) -> None:
        """Send what is held, then close."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is held is lost, like all that was not sent."""
        if self._held is not None:
            self._take()
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closing or closed."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Take in no more."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take in again."""
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Bytes that were written and not yet sent."""
        return self._transport.get_write_buffer_size() + (0 if self._held is None else len(self._held))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts of the connection."""
        return self._transport.get_extra_info(name, default)

    def _send(self, pieces: list[bytes]) -> None:
        # The client may have gone since the first of them was written.
        if not self._transport.is_closing():
            self._transport.writelines(pieces)

    def _take(self) -> bytes:
        assert self._held is not None and self._flushing is not None
        self._flushing.cancel()
        held, self._held, self._flushing = self._held, None, None
        return held


class WholeResponses(HttpToolsProtocol):
    """uvicorn's protocol over such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(GatheringTransport(transport))
