"""The API under a path of its host, as ``https://host/twinkle``. Whoever stands before it may cut that off or not.

What is within sees the paths that it knows in either case; only the URLs that are given out begin with the path.
"""

from __future__ import annotations

from fastapi import Request
from starlette.types import Scope

from twinkle.core.errors import InvalidInput
from twinkle.core.settings import Settings

_SCOPE_KEY = "twinkle.mounted_at"
_EVERYWHERE = ("0.0.0.0", "::", "")


def unmounted(scope: Scope, mounted_at: str) -> Scope:
    """A request as it would be at the root of its host.

    Args:
        scope: The request's; a server or an app around this one may say in it under which path this one lies.
        mounted_at: The path under which it lies if nothing is said; empty for none.
    """
    prefix: str = scope.get("root_path") or mounted_at
    if not prefix:
        return scope
    path, raw_path = scope["path"], scope.get("raw_path")
    cut = {**scope, "root_path": "", _SCOPE_KEY: prefix}
    if path == prefix or path.startswith(f"{prefix}/"):
        cut["path"] = path[len(prefix) :] or "/"
        # The prefix has no character that is written otherwise in a URL.
        if raw_path is not None and raw_path.startswith(prefix.encode()):
            cut["raw_path"] = raw_path[len(prefix) :] or b"/"
    return cut


def base_url_of(settings: Settings, request: Request) -> str:
    """What URLs of ours begin with: as the operator says, else where this server listens.

    What a client calls us comes back to it only where the operator has said that this is our name.

    Raises:
        InvalidInput: Nobody said, this server listens everywhere, and the client asks under another name.
    """
    return settings.public_url or f"{request.url.scheme}://{_host_of(settings, request)}" + request.scope.get(
        _SCOPE_KEY, ""
    )


def _host_of(settings: Settings, request: Request) -> str:
    asked = request.headers.get("host", "").lower()
    if asked in {name.lower() for name in settings.allowed_hosts}:
        return asked
    reached: tuple[str, int | None] = request.scope.get("server") or (settings.host, settings.port)
    if settings.host not in _EVERYWHERE:
        return _netloc(settings.host, reached[1])
    # The address under which this very connection was made is one of ours.
    here = _netloc(*reached)
    if asked != here:
        raise InvalidInput(
            "Host",
            "is none under which this server gives out URLs; its operator must set TWINKLE_PUBLIC_URL, or name it in"
            " TWINKLE_ALLOWED_HOSTS",
        )
    return here


def _netloc(host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"
