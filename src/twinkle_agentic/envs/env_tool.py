"""An environment's actions as tools."""

from __future__ import annotations

from typing import Any

from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.tools.base import Tool

EPISODE_REWARD = "episode_reward"
ANYTHING: dict[str, Any] = {"type": "object", "properties": {}}


class EnvTool(Tool):
    """One action of an environment. It keeps the last outcome and the sum of the rewards of its own steps.

    Args:
        env: The environment.
        tool_name: What the model calls the action.
        description: What the model is told of it.
        parameters: The JSON schema of its arguments.
    """

    def __init__(
        self,
        env: Env,
        tool_name: str = "env_action",
        description: str = "Take an action in the environment.",
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self.env = env
        self._name = tool_name
        self._description = description
        self._parameters = parameters or ANYTHING
        self._sum = 0.0
        self.last_result: StepResult | None = None

    @classmethod
    def from_env(cls, env: Env) -> list[EnvTool]:
        """A tool for each action that the environment tells of; one that takes anything if it tells of none."""
        functions = [info.get("function") or {} for info in env.tools()]
        return [
            cls(env, function["name"], function.get("description", ""), function.get("parameters"))
            for function in functions
        ] or [cls(env)]

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Take the action."""
        self.last_result = self.env.step(tool_name, arguments)
        self._sum += self.last_result.reward
        return self.last_result.observation

    def tool_info(self) -> ToolInfo:
        """See :class:`Tool`."""
        return {
            "type": "function",
            "function": {"name": self._name, "description": self._description, "parameters": self._parameters},
        }

    @property
    def done(self) -> bool:
        """Whether the episode is over, as far as this action's last step tells."""
        return self.last_result is not None and self.last_result.done

    @property
    def episode_reward(self) -> float:
        """The episode's reward so far: as the environment tells it (``info``), else the sum of this tool's steps."""
        if self.last_result is not None and EPISODE_REWARD in self.last_result.info:
            return float(self.last_result.info[EPISODE_REWARD])
        return self._sum
