"""Which server of the Twinkle dialect, and as whom: from arguments, else from the environment, else on this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

from pydantic import SecretStr

from twinkle.core.errors import ConfigError
from twinkle.core.model_names import plain_model_name

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `twinkle-server` listens unless it is told otherwise."""
ANY_KEY = "EMPTY_TOKEN"
"""What is sent where nothing is given, to servers that take any key."""
URL_VARIABLES = ("TWINKLE_SERVER_URL", "TINKER_BASE_URL")
KEY_VARIABLES = ("TWINKLE_SERVER_TOKEN", "TINKER_API_KEY")

_API = "/api/v1"


@dataclass(frozen=True)
class Endpoint:
    """A server's address up to ``/api/v1``, the key that opens it, and what this process is called there."""

    url: str
    api_key: SecretStr
    route_prefix: str = "/twinkle"
    """Of the gateway's routes: sessions, runs, checkpoints, futures."""
    request_id: str = field(default_factory=lambda: f"{datetime.now():%Y%m%d_%H%M%S}-{secrets.token_hex(4)}")
    """The same for all requests of a process; upstream's server keeps a client on its replica by it."""

    def headers(self) -> dict[str, str]:
        """Those of every request."""
        bearer = f"Bearer {self.api_key.get_secret_value()}"
        return {
            "x-request-id": self.request_id,
            # A server behind Ray Serve refuses requests without them; ours needs none.
            "X-Ray-Serve-Request-Id": self.request_id,
            "serve_multiplexed_model_id": self.request_id,
            "Serve-Multiplexed-Model-Id": self.request_id,
            "Authorization": bearer,
            "Twinkle-Authorization": bearer,
        }


def find_endpoint(
    base_url: str | None = None,
    api_key: str | None = None,
    *,
    route_prefix: str = "/twinkle",
    environment: Mapping[str, str] | None = None,
) -> Endpoint:
    """The endpoint that is meant; an empty string is as good as none.

    Raises:
        ConfigError: The URL is none, or the key cannot be sent.
    """
    environment = os.environ if environment is None else environment
    url = (base_url or _first(environment, URL_VARIABLES) or DEFAULT_URL).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url: must begin with http:// or https://, not {url!r}")
    key = api_key or _first(environment, KEY_VARIABLES) or ANY_KEY
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key: holds characters that no HTTP header can carry; send letters, digits and signs")
    prefix = "/" + route_prefix.strip("/") if route_prefix.strip("/") else ""
    return Endpoint(url if url.endswith(_API) else url + _API, SecretStr(key), prefix)


def model_path(service: str, model_id: str) -> str:
    """Where a base model's calls go, ``service`` being ``model`` or ``sampler``: its name without its hub."""
    return f"/{service}/{quote(plain_model_name(model_id), safe='/@')}/twinkle"


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")
