"""Which server, and as whom: from arguments, else from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import SecretStr

from twinkle.client.errors import ConfigError
from twinkle.core.ids import API_KEY_PREFIX

DEFAULT_URL = "http://127.0.0.1:8765"

URL_VARIABLES = ("TWINKLE_SERVER_URL", "TINKER_BASE_URL")
KEY_VARIABLES = ("TWINKLE_SERVER_TOKEN", "TINKER_API_KEY")
JOB_VARIABLE = "TWINKLE_JOB_ID"
"""Of a script that the service runs itself: its job."""


@dataclass(frozen=True)
class Endpoint:
    """A server's address without a slash at its end, and the key that opens it."""

    url: str
    api_key: SecretStr


def find_endpoint(
    base_url: str | None = None, api_key: str | None = None, *, environment: Mapping[str, str] | None = None
) -> Endpoint:
    """The endpoint that is meant: arguments win, then our own variables, then those of the official SDK.

    Raises:
        ConfigError: There is no key, or it cannot be one, or the URL is not one.
    """
    environment = os.environ if environment is None else environment
    url = base_url or _first(environment, URL_VARIABLES) or DEFAULT_URL
    key = api_key or _first(environment, KEY_VARIABLES) or ""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url: must begin with http:// or https://, not {url!r}")
    if not key.startswith(API_KEY_PREFIX):
        raise ConfigError(
            f"api_key: must begin with {API_KEY_PREFIX}; make one with `twinkle keys create` and pass it here"
            f" or set {KEY_VARIABLES[0]}"
        )
    return Endpoint(url.rstrip("/"), SecretStr(key))


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")
