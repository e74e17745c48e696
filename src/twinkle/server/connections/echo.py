"""The id that a client gives its request, sent back to it: for those that look for their request in their own logs."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME = b"x-request-id"
_MAX_LENGTH = 256
_PATHS = ("/api/v1/twinkle/", "/api/v1/model/", "/api/v1/sampler/", "/api/v1/processor/")
"""Of the Twinkle dialect, whose clients send one with every call; it deduplicates nothing."""


def request_id_to_echo(scope: Scope) -> bytes | None:
    """The id of a request of this dialect, if it is one to send back: short, and printable throughout."""
    if not scope["path"].startswith(_PATHS):
        return None
    given: bytes | None = next((value for name, value in scope["headers"] if name == _NAME), None)
    if not given or len(given) > _MAX_LENGTH or not all(0x21 <= byte <= 0x7E for byte in given):
        return None
    return given


def echoing(app: ASGIApp, request_id: bytes) -> ASGIApp:
    """The app, with the id among the headers of its answer."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (_NAME, request_id)]}
            await send(message)

        await app(scope, receive, send_with_id)

    return call
