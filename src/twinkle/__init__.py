"""Twinkle: a shared training service, and the training library behind it.

Importing this package is cheap: torch, SQLAlchemy and Celery load only with the part that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core import __version__
from twinkle.core.process.lazy import lazy_attributes
from twinkle.core.process.same_names import warn_of_other_distribution

if TYPE_CHECKING:
    from twinkle.core.process.requirements import exists, requires
    from twinkle.core.process.trust import check_unsafe, trust_remote_code
    from twinkle.infra.device_group import DeviceGroup
    from twinkle.infra.device_mesh import DeviceMesh
    from twinkle.infra.frameworks import framework_util, torch_util
    from twinkle.infra.network import find_free_port, find_node_ip
    from twinkle.infra.placement import get_device_placement
    from twinkle.infra.platform import GPU, NPU, Platform
    from twinkle.infra.rank_log import get_logger
    from twinkle.infra.remote import remote_class, remote_function
    from twinkle.infra.runtime import initialize, is_master
    from twinkle.plugin.loading import Plugin
    from twinkle_client import init_tinker_client, init_twinkle_client

_PLACES = {
    "DeviceGroup": "twinkle.infra.device_group",
    "DeviceMesh": "twinkle.infra.device_mesh",
    "GPU": "twinkle.infra.platform",
    "NPU": "twinkle.infra.platform",
    "Platform": "twinkle.infra.platform",
    "Plugin": "twinkle.plugin.loading",
    "check_unsafe": "twinkle.core.process.trust",
    "exists": "twinkle.core.process.requirements",
    "find_free_port": "twinkle.infra.network",
    "find_node_ip": "twinkle.infra.network",
    "framework_util": "twinkle.infra.frameworks",
    "get_device_placement": "twinkle.infra.placement",
    "get_logger": "twinkle.infra.rank_log",
    "init_tinker_client": "twinkle_client",
    "init_twinkle_client": "twinkle_client",
    "initialize": "twinkle.infra.runtime",
    "is_master": "twinkle.infra.runtime",
    "remote_class": "twinkle.infra.remote",
    "remote_function": "twinkle.infra.remote",
    "requires": "twinkle.core.process.requirements",
    "torch_util": "twinkle.infra.frameworks",
    "trust_remote_code": "twinkle.core.process.trust",
}

__all__ = [
    "GPU",
    "NPU",
    "DeviceGroup",
    "DeviceMesh",
    "Platform",
    "Plugin",
    "__version__",
    "check_unsafe",
    "exists",
    "find_free_port",
    "find_node_ip",
    "framework_util",
    "get_device_placement",
    "get_logger",
    "init_tinker_client",
    "init_twinkle_client",
    "initialize",
    "is_master",
    "remote_class",
    "remote_function",
    "requires",
    "torch_util",
    "trust_remote_code",
]

warn_of_other_distribution()

__getattr__ = lazy_attributes(__name__, _PLACES)
