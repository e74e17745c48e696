"""Where scripts import small things from; each lives where it belongs, and loads when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.core.process.requirements import exists, requires
    from twinkle.core.process.trust import check_unsafe, trust_remote_code
    from twinkle.infra.device_group import DeviceGroup
    from twinkle.infra.device_mesh import DeviceMesh
    from twinkle.infra.frameworks import framework_util, torch_util
    from twinkle.infra.network import find_free_port, find_node_ip
    from twinkle.infra.platform import GPU, NPU, Platform, is_torch_npu_available
    from twinkle.infra.rank_log import get_logger
    from twinkle.infra.runtime import is_master
    from twinkle.plugin.construct import construct_class
    from twinkle.plugin.loading import Plugin

__all__ = [
    "GPU",
    "NPU",
    "DeviceGroup",
    "DeviceMesh",
    "Platform",
    "Plugin",
    "check_unsafe",
    "construct_class",
    "exists",
    "find_free_port",
    "find_node_ip",
    "framework_util",
    "get_logger",
    "is_master",
    "is_torch_npu_available",
    "requires",
    "torch_util",
    "trust_remote_code",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(__all__, "twinkle"),
        "construct_class": "twinkle.plugin.construct",
        "is_torch_npu_available": "twinkle.infra.platform",
    },
)
