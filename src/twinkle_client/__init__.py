"""The client package of Twinkle scripts: thin, typed, no torch. The classes have the names of the library's.

client          a session on a server, and its questions
model, sampler  models and samplers at the server, under the library's names
dataset, dataloader, processor  data sets that live at the server
futures         calls that are not waited for
connection      the way there: ``sending`` of requests, ``arguments`` and ``answers`` of calls, ``errors``
tinker          the official SDK on such a server
template, preprocessor, reward, advantage, metric, loss, data_format  the library's own (``same_names``), used here
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes
from twinkle_client.tinker import init_tinker_client, init_tinker_compat_client

if TYPE_CHECKING:
    from twinkle.infra.device_group import DeviceGroup
    from twinkle.infra.device_mesh import DeviceMesh
    from twinkle.infra.placement import get_device_placement
    from twinkle.infra.rank_log import get_logger
    from twinkle.infra.runtime import initialize
    from twinkle_client.client import TwinkleClient, init_twinkle_client
    from twinkle_client.futures import CallFuture

_PLACES = {
    "CallFuture": "twinkle_client.futures",
    "DeviceGroup": "twinkle.infra.device_group",
    "DeviceMesh": "twinkle.infra.device_mesh",
    "TwinkleClient": "twinkle_client.client",
    "get_device_placement": "twinkle.infra.placement",
    "get_logger": "twinkle.infra.rank_log",
    "init_twinkle_client": "twinkle_client.client",
    "initialize": "twinkle.infra.runtime",
}

__all__ = [
    "CallFuture",
    "DeviceGroup",
    "DeviceMesh",
    "TwinkleClient",
    "get_device_placement",
    "get_logger",
    "init_tinker_client",
    "init_tinker_compat_client",
    "init_twinkle_client",
    "initialize",
]

__getattr__ = lazy_attributes(__name__, _PLACES)
