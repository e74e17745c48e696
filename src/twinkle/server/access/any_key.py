"""A development server that takes any key: each distinct one, and none at all, opens a tenant of its own.

It is for one person's machine. So it listens there alone, and answers only what was sent from there: a proxy would let
others in, and a web page could ask on behalf of whoever looks at it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Request

from twinkle.core.errors import Unauthenticated
from twinkle.core.loopback import is_loopback
from twinkle.core.settings import Settings

_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


def is_neighbour(settings: Settings, request: Request) -> bool:
    """Whether a request can only have come from a program on this machine: nothing else reaches this server."""
    asked = urlsplit(f"//{request.headers.get('host', '')}").hostname
    return (
        is_loopback(settings.host)
        and not settings.public_url
        and asked is not None
        and is_loopback(asked)
        and not any(header in request.headers for header in _FORWARDED)
    )


def refuse_strangers(request: Request) -> None:
    """Refuse what may come from somewhere else than this machine's own programs.

    Raises:
        Unauthenticated: It came through a proxy, from a web page, or under a name that is not this machine's.
    """
    for header in _FORWARDED:
        if header in request.headers:
            raise Unauthenticated(
                f"this server takes any key and answers this machine alone, but {header} says that the request was"
                " forwarded; start it without --any-key"
            )
    asked = urlsplit(f"//{request.headers.get('host', '')}").hostname
    if asked is None or not is_loopback(asked):
        raise Unauthenticated(
            f"this server takes any key and answers to 127.0.0.1, ::1 and localhost only, not to {asked!r}"
        )
    origin = request.headers.get("origin")
    if origin is not None and not is_loopback(urlsplit(origin).hostname or ""):
        raise Unauthenticated("this server takes any key and answers no web page that comes from elsewhere")
