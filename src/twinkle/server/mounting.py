"""The API under a path of its host, as ``https://host/twinkle``. Whoever stands before it may cut that off or not.

What is within sees the paths that it knows in either case; only the URLs that are given out begin with the path.
"""

from __future__ import annotations

from fastapi import Request
from starlette.types import Scope

from twinkle.core.settings import Settings

_SCOPE_KEY = "twinkle.mounted_at"


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
    """What URLs of ours begin with: as the operator says, else as the client asks."""
    return settings.public_url or str(request.base_url).rstrip("/") + request.scope.get(_SCOPE_KEY, "")
