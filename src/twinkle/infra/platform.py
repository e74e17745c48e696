"""The kinds of devices: what torch calls them, how ranks on them talk, how many this machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass

from twinkle.core.errors import ConfigError
from twinkle.infra.device_mesh import current_rank, current_world_size


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One kind of device.

    ``backend`` is torch.distributed's: tensors of the device travel by its maker's library, those on the host by gloo.
    """

    device_type: str
    backend: str
    visible_devices_variable: str | None = None

    @classmethod
    def named(cls, name: str) -> Platform:
        """The platform of a device type, in any case; ``GPU`` means CUDA, and AMD's too, whose torch calls itself so.

        Raises:
            ConfigError: This project runs on no such device.
        """
        platform = PLATFORMS.get({"gpu": "cuda"}.get(name.lower(), name.lower()))
        if platform is None:
            raise ConfigError(f"device_type: {name!r} is not supported; use {' or '.join(PLATFORMS)}")
        return platform

    @classmethod
    def current(cls) -> Platform:
        """That of the accelerator that torch finds, else the CPU."""
        import torch  # noqa: PLC0415 - a layout can be described where torch is not installed

        found = torch.accelerator.current_accelerator(check_available=True)
        return CPU if found is None else cls.named(found.type)

    def num_devices(self) -> int:
        """How many devices of this kind a process can see. The CPU of a machine is one."""
        if self.device_type == "cpu":
            return 1
        import torch  # noqa: PLC0415 - a layout can be described where torch is not installed

        found = torch.accelerator.current_accelerator()
        return 0 if found is None or found.type != self.device_type else torch.accelerator.device_count()

    def require(self, device: str) -> None:
        """Look whether this machine has a device of this kind, as torch names it.

        Raises:
            ConfigError: It has none, or not so many.
        """
        number, num_devices = device.partition(":")[2], self.num_devices()
        is_there = not number or (number.isdecimal() and int(number) < num_devices)
        if self.device_type == "cpu" or (num_devices and is_there):
            return
        found = "torch finds none here" if not num_devices else f"there is {self.device_type}:0"
        if num_devices > 1:
            found += f" to {self.device_type}:{num_devices - 1}"
        raise ConfigError(
            f"TWINKLE_DEVICE: {device} is missing: {found}; look at the driver and at which torch is installed, or"
            " name another device"
        )

    def device_of(self, local_rank: int) -> str:
        """The device of the ``local_rank``-th process on this machine, as torch names it."""
        return "cpu" if self.device_type == "cpu" else f"{self.device_type}:{local_rank}"

    # The same by the names that scripts ask under.

    @staticmethod
    def get_platform_names() -> list[str]:
        """The kinds of devices there may be."""
        return list(PLATFORMS)

    @staticmethod
    def get_platform(name: str | None = None) -> Platform:
        """The platform of a device type, else that of this machine."""
        return Platform.current() if name is None else Platform.named(name)

    @staticmethod
    def get_rank() -> int:
        """The number of this process; 0 when alone."""
        return current_rank()

    @staticmethod
    def get_local_rank() -> int:
        """Its number among those of its machine."""
        return local_rank()

    @staticmethod
    def get_world_size() -> int:
        """How many were started together."""
        return current_world_size()

    @staticmethod
    def get_local_device() -> str:
        """The device of this process."""
        return Platform.current().device_of(local_rank())

    def device_prefix(self) -> str:
        """How torch calls this kind of device."""
        return self.device_type

    def visible_device_env(self) -> str | None:
        """The variable that says which devices a process sees."""
        return self.visible_devices_variable


CPU = Platform(device_type="cpu", backend="gloo")
CUDA = Platform(device_type="cuda", backend="cpu:gloo,cuda:nccl", visible_devices_variable="CUDA_VISIBLE_DEVICES")
NPU = Platform(device_type="npu", backend="cpu:gloo,npu:hccl", visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES")
XPU = Platform(device_type="xpu", backend="cpu:gloo,xpu:xccl", visible_devices_variable="ZE_AFFINITY_MASK")
GPU = CUDA
MPS = Platform(device_type="mps", backend="gloo")
PLATFORMS = {platform.device_type: platform for platform in (CUDA, NPU, XPU, MPS, CPU)}


def local_rank() -> int:
    """The number of this process among those of its machine, as torchrun and our own launcher say; 0 when alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_torch_npu_available(check_device: bool = False) -> bool:
    """Whether torch finds an Ascend device here; scripts ask before they load what is for those alone.

    Args:
        check_device: Has no effect: a device that is not there is never available.
    """
    return Platform.current().device_type == "npu"
