"""Devices: which there are, how ranks are laid out on them, and how they meet."""

from __future__ import annotations

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.platform import Platform

__all__ = ["DeviceGroup", "DeviceMesh", "Platform"]
