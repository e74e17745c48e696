"""The client package of Twinkle scripts: thin, typed, no torch. The classes have the names of the library's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.lazy import lazy_attributes
from twinkle_client.tinker import init_tinker_client, init_tinker_compat_client

if TYPE_CHECKING:
    from twinkle.infra.rank_log import get_logger
    from twinkle_client.client import TwinkleClient, init_twinkle_client
    from twinkle_client.futures import CallFuture

_PLACES = {
    "CallFuture": "twinkle_client.futures",
    "TwinkleClient": "twinkle_client.client",
    "get_logger": "twinkle.infra.rank_log",
    "init_twinkle_client": "twinkle_client.client",
}

__all__ = [
    "CallFuture",
    "TwinkleClient",
    "get_logger",
    "init_tinker_client",
    "init_tinker_compat_client",
    "init_twinkle_client",
]

__getattr__ = lazy_attributes(__name__, _PLACES)
