"""Named sets of devices that a script's components share or keep apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.errors import ConfigError
from twinkle.infra.platform import Platform


@dataclass(frozen=True)
class DeviceGroup:
    """Devices under one name.

    Args:
        name: What components call it.
        ranks: The devices' numbers, or how many.
        device_type: ``cuda`` (also ``GPU``), ``npu``, ``cpu``...
        gpus_per_worker: Devices that each worker process gets.
        visible_devices: The physical devices behind ``ranks``, by their own numbers; all of the machine if omitted.

    Raises:
        ConfigError: A field is outside its limits.
    """

    name: str
    ranks: int | Sequence[int]
    device_type: str
    gpus_per_worker: int = 1
    visible_devices: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("DeviceGroup.name: is empty; components choose their group by it")
        numbers = tuple(range(self.ranks)) if isinstance(self.ranks, int) else tuple(self.ranks)
        if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise ConfigError(
                f"DeviceGroup.ranks: {self.ranks} in group {self.name}; give how many, or each number from 0 on once"
            )
        if self.gpus_per_worker < 1 or len(numbers) % self.gpus_per_worker:
            raise ConfigError(
                f"DeviceGroup.gpus_per_worker: {self.gpus_per_worker} must divide the {len(numbers)} devices of group"
                f" {self.name}"
            )
        object.__setattr__(self, "ranks", numbers)
        object.__setattr__(self, "device_type", Platform.named(self.device_type).device_type)

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The devices' numbers."""
        assert not isinstance(self.ranks, int), "made a tuple when the group was"
        return tuple(self.ranks)

    @property
    def num_workers(self) -> int:
        """How many worker processes the group has."""
        return len(self.rank_numbers) // self.gpus_per_worker


def check_groups(groups: Sequence[DeviceGroup]) -> None:
    """Raise ``ConfigError`` when a name stands for two groups."""
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(f"groups: a name may stand for one group only, got {', '.join(names)}")
