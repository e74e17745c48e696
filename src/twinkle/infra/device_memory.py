"""A bound in bytes for everything on one device, and who holds how much of it.

What must be there holds its part: the base model, adapters, the caches of what is sampled. What is kept to be quick is
a guest in what these leave, and gives way before them, in the order in which guests were made known.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twinkle.core.process.events import event_log

log = event_log()

DEVICE_PART = 0.9
"""Of what is free on an accelerator at start; the rest is for what kernels take and for what lies between tensors."""
HOST_PART = 0.8
"""Of a machine's memory, or of what the control group allows: other processes need some."""
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
GB = 1e9


class Holder(Protocol):
    """Something on the device."""

    @property
    def size_bytes(self) -> int:
        """What it takes now."""
        ...


class Guest(Holder, Protocol):
    """Something that can be made again."""

    def give_back(self, num_bytes: int) -> None:
        """Shrink by so many, or by all there is."""
        ...


class DeviceMemory:
    """What one device has for one process: a limit, parts that are kept free, and who holds how much.

    Args:
        limit_bytes: In all. None: nothing is bounded, what the device has free is what there is.
        device: Whose memory it is.
    """

    def __init__(self, limit_bytes: int | None, device: torch.device) -> None:
        self.limit_bytes = limit_bytes
        self._device = device
        self._fixed: dict[str, int] = {}
        self._reserved: dict[str, int] = {}
        self._holders: list[tuple[str, weakref.ref[Holder]]] = []
        self._guests: list[tuple[str, weakref.ref[Guest]]] = []

    def fix(self, name: str, num_bytes: int) -> None:
        """So many are held for good."""
        self._fixed[name] = num_bytes

    def reserve(self, name: str, num_bytes: int) -> None:
        """So many are promised to a holder, whether it has them yet or not."""
        self._reserved[name] = num_bytes

    def add(self, name: str, holder: Holder) -> None:
        """Count what it takes for as long as it lives."""
        self._holders.append((name, weakref.ref(holder)))

    def add_guest(self, name: str, guest: Guest) -> None:
        """Count it as well; it gives way when others need its room, those added first before those added later."""
        self._guests.append((name, weakref.ref(guest)))

    @property
    def held(self) -> dict[str, int]:
        """What everyone holds now, by name."""
        found = dict(self._fixed)
        references: list[tuple[str, weakref.ref[Holder] | weakref.ref[Guest]]] = [*self._holders, *self._guests]
        for name, reference in references:
            holder = reference()
            if holder is not None:
                found[name] = found.get(name, 0) + holder.size_bytes
        return found

    @property
    def free_bytes(self) -> int:
        """What nobody holds; below zero where more is held than may be."""
        if self.limit_bytes is None:
            return free_bytes(self._device)
        return self.limit_bytes - sum(self.held.values())

    @property
    def obtainable_bytes(self) -> int:
        """What nobody holds, once all guests have given way."""
        obtainable = self.free_bytes + self._guest_bytes
        if self._device.type == "cuda" and self.limit_bytes is not None:
            # Others may be on the same device.
            return min(obtainable, free_bytes(self._device) + self._guest_bytes)
        return obtainable

    @property
    def room_for_guests(self) -> int:
        """What nobody holds and is promised to nobody, who may not ask before they take it."""
        unpromised = self.unpromised_bytes
        return self.free_bytes if unpromised is None else min(self.free_bytes, unpromised - self._guest_bytes)

    @property
    def _guest_bytes(self) -> int:
        return sum(guest.size_bytes for _, reference in self._guests if (guest := reference()) is not None)

    @property
    def unpromised_bytes(self) -> int | None:
        """What there always can be for something else, beside what is fixed and promised. None: there is no limit."""
        if self.limit_bytes is None:
            return None
        return self.limit_bytes - sum(self._fixed.values()) - sum(self._reserved.values())

    def make_room(self, num_bytes: int) -> None:
        """Let guests give way until so many are free, as far as they can."""
        if self.limit_bytes is None:
            return
        for name, reference in self._guests:
            missing = num_bytes - self.free_bytes
            if missing <= 0:
                return
            guest = reference()
            if guest is None or not guest.size_bytes:
                continue
            before = guest.size_bytes
            guest.give_back(missing)
            given = before - guest.size_bytes
            log.info("memory.given_way", guest=name, num_bytes=given, wanted=num_bytes, **self.held)

    def told(self) -> str:
        """Who holds what, in words."""
        parts = ", ".join(f"{name} {size / GB:.3g} GB" for name, size in self.held.items())
        limit = "no limit" if self.limit_bytes is None else f"{self.limit_bytes / GB:.3g} GB"
        return f"{limit} (TWINKLE_DEVICE_BYTES), of which are held: {parts}"


def unbounded(device: torch.device) -> DeviceMemory:
    """One that only counts."""
    return DeviceMemory(None, device)


def free_bytes(device: torch.device) -> int:
    """What of a device's memory may still be taken; of a host's, which others use too, half of all there is."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_bytes() // 2


def default_limit(device: torch.device, num_processes: int) -> int:
    """What a process may take of a device, or of a host's memory beside others of the same kind."""
    if device.type == "cuda":
        return int(free_bytes(device) * DEVICE_PART)
    return int(host_bytes() * HOST_PART) // num_processes


def host_bytes(cgroup: Path = CGROUP, own: Path = OWN_CGROUP) -> int:
    """The machine's memory, or less where a control group allows less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_group_limits(cgroup, own)])


def _group_limits(cgroup: Path, own: Path) -> list[int]:
    """The limits of this process's control group and of those that it lies in."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    limits = []
    for _, controllers, path in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroup / "memory" if controllers else cgroup
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / path.strip("/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(root):
                break
            text = _read(each / name)
            if text.isdecimal():
                limits.append(int(text))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def bytes_of(module: torch.nn.Module) -> int:
    """What a module's weights take on this device, each memory once; of sharded ones this rank's part."""
    return sum(storages_of((*module.parameters(), *module.buffers())).values())


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The memories that tensors lie in, by address, and their sizes; of tensors that are made of others, of those."""
    found: dict[int, int] = {}
    pending: list[Any] = list(tensors)
    while pending:
        tensor = pending.pop()
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            # Of a sharded one its mesh is among them.
            parts = [getattr(tensor, name) for name in names]
            pending += [part for part in parts if isinstance(part, torch.Tensor)]
        elif tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found
