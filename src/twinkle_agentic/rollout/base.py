"""What a rollout is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


class Rollout(ABC):
    """Takes trajectories as far as they go: as many out as in, in their order."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[Row]:
        """The trajectories with what was said."""
