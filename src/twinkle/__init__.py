"""Twinkle: a shared training service, and the training library behind it.

Importing this package is cheap: torch, SQLAlchemy and Celery load only with the part that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core import __version__
from twinkle.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.infra.device_group import DeviceGroup
    from twinkle.infra.device_mesh import DeviceMesh
    from twinkle.infra.placement import get_device_placement
    from twinkle.infra.platform import Platform
    from twinkle.infra.runtime import initialize, is_master

__all__ = [
    "DeviceGroup",
    "DeviceMesh",
    "Platform",
    "__version__",
    "get_device_placement",
    "initialize",
    "is_master",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "DeviceGroup": "twinkle.infra.device_group",
        "DeviceMesh": "twinkle.infra.device_mesh",
        "Platform": "twinkle.infra.platform",
        "get_device_placement": "twinkle.infra.placement",
        "initialize": "twinkle.infra.runtime",
        "is_master": "twinkle.infra.runtime",
    },
)
