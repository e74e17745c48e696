"""A pytest plugin: a process reads the certificates of the world's authorities once.

Every client of httpx reads them anew, ours, the SDK's and the plain ones of the tests alike: 25 ms of a core, more than
most requests to a server of this machine, and none of these speaks TLS.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Any

import pytest
from httpx._transports import default

_NAMES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_create = default.create_ssl_context


def pytest_configure(config: pytest.Config) -> None:
    default.create_ssl_context = shared_ssl_context  # type: ignore[assignment]


def pytest_unconfigure(config: pytest.Config) -> None:
    default.create_ssl_context = _create


def shared_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """The one context of all who trust what everybody trusts; whoever names something else gets one of his own."""
    if verify is not True or cert is not None:
        return _create(verify=verify, cert=cert, trust_env=trust_env)
    return _default_context(trust_env, *(os.environ.get(name) for name in _NAMES))


@cache
def _default_context(trust_env: bool, *places: str | None) -> ssl.SSLContext:
    return _create(trust_env=trust_env)
