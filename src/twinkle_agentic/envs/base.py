"""What an environment is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle.data_format.conversation import Trajectory


@dataclass
class StepResult:
    """What an action led to."""

    observation: str = ""
    reward: float = 0.0
    """Of this step."""
    done: bool = False
    """Whether the episode is over."""
    info: dict[str, Any] = field(default_factory=dict)


class Env(ABC):
    """One episode after the other: ``reset``, then ``step`` until it is done. One of one's own brings ``step``."""

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode; what there is to see at its start."""
        return StepResult()

    @abstractmethod
    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Take an action."""

    def step_batch(self, actions: Sequence[tuple[str, dict[str, Any]]]) -> list[StepResult]:
        """Take several, one after the other."""
        return [self.step(tool_name, arguments) for tool_name, arguments in actions]

    def tools(self) -> list[ToolInfo]:
        """The actions there are, as a model is told of them; none: one that takes anything."""
        return []

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Rewards of whole conversations, where they are known only then."""
        return [0.0] * len(trajectories)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what the environment holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
