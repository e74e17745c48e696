"""Devices: which there are, how ranks are laid out on them, and how they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes
from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.platform import Platform

if TYPE_CHECKING:
    from twinkle.infra.placement import get_device_placement
    from twinkle.infra.rank_log import get_logger
    from twinkle.infra.remote import remote_class, remote_function
    from twinkle.infra.runtime import initialize, is_master

__all__ = [
    "DeviceGroup",
    "DeviceMesh",
    "Platform",
    "get_device_placement",
    "get_logger",
    "initialize",
    "is_master",
    "remote_class",
    "remote_function",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "get_device_placement": "twinkle.infra.placement",
        "get_logger": "twinkle.infra.rank_log",
        "initialize": "twinkle.infra.runtime",
        "is_master": "twinkle.infra.runtime",
        "remote_class": "twinkle.infra.remote",
        "remote_function": "twinkle.infra.remote",
    },
)
