"""Point the official Tinker SDK at a Twinkle server."""

from __future__ import annotations

import os

_DEFAULT_URL = "http://127.0.0.1:8765"


def init_tinker_client(*, base_url: str | None = None, api_key: str | None = None) -> None:
    """Make ``tinker.ServiceClient()`` talk to a Twinkle server from now on, in this process and its children.

    The SDK itself stays as it is: its own environment variables are set, from the arguments, else from
    ``TWINKLE_SERVER_URL`` and ``TWINKLE_SERVER_TOKEN``, else (the URL) to a server on this machine.

    Args:
        base_url: For example ``http://127.0.0.1:8765``.
        api_key: A key of that server; begins with ``tml-``.

    Raises:
        ValueError: There is no key, or it is not one the SDK accepts.
    """
    url = base_url or os.environ.get("TWINKLE_SERVER_URL") or os.environ.get("TINKER_BASE_URL") or _DEFAULT_URL
    key = api_key or os.environ.get("TWINKLE_SERVER_TOKEN") or os.environ.get("TINKER_API_KEY") or ""
    if not key.startswith("tml-"):
        raise ValueError(
            "api_key: must begin with tml-; make one with `twinkle keys create` and pass it here"
            " or set TWINKLE_SERVER_TOKEN"
        )
    os.environ["TINKER_BASE_URL"] = url.rstrip("/")
    os.environ["TINKER_API_KEY"] = key
