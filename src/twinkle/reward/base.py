"""What a reward is, and what it reads of a trajectory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.conversation import user_data_get

Trajectories = Sequence[Mapping[str, Any]]
GroundTruths = Sequence[Any] | None
"""For each trajectory the truth itself or a trajectory that bears it; none or empty: each bears its own."""


class Reward(ABC):
    """A callable on trajectories, whose last assistant message is judged. A reward of one's own brings the call."""

    @abstractmethod
    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory, in their order."""


def completion_of(trajectory: Mapping[str, Any]) -> str:
    """The text of the last assistant message; empty where there is none."""
    for message in reversed(trajectory.get("messages") or []):
        if message.get("role") == "assistant":
            return text_of(message.get("content"))
    return ""


def text_of(content: Any) -> str:
    """The text of a message's content: itself, or its parts that are text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def truths_of(trajectories: Trajectories, ground_truths: GroundTruths, *keys: str) -> list[str | None]:
    """The truth of each trajectory: as given, else what its ``user_data`` has under the first key that is there.

    Raises:
        InvalidInput: There is another number of truths than of trajectories.
    """
    bearers: Sequence[Any] = ground_truths or trajectories
    if len(bearers) != len(trajectories):
        raise InvalidInput(
            "ground_truths", f"has {len(bearers)} entries for {len(trajectories)} trajectories; send one for each"
        )
    truths: list[str | None] = []
    for bearer in bearers:
        value = bearer
        if isinstance(bearer, Mapping):
            found = (user_data_get(bearer.get("user_data"), key) for key in keys)
            value = next((truth for truth in found if truth is not None), None)
        truths.append(None if value is None else str(value))
    return truths
