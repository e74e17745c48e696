"""Many environments of one kind: a slot for each trajectory of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle.data_format.conversation import Trajectory
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EPISODE_REWARD
from twinkle_agentic.envs.openenv import OpenEnv


class EnvPool:
    """Environments by number, each made when it is first used.

    Args:
        pool_size: How many.
        env_cls: What makes one; OpenEnv's if omitted.
        env_kwargs: Its arguments.
        remote_group: The group of devices it belongs to; in one process there is nothing else to be on.
        device_mesh: As ``remote_group``.
    """

    def __init__(
        self,
        pool_size: int,
        env_cls: Callable[..., Env] = OpenEnv,
        env_kwargs: dict[str, Any] | None = None,
        *,
        remote_group: str | None = None,
        device_mesh: object = None,
    ) -> None:
        if pool_size < 1:
            raise InvalidInput("pool_size", f"is {pool_size}; send 1 or more")
        self._pool_size = pool_size
        self._make = env_cls
        self._arguments = dict(env_kwargs or {})
        self._envs: dict[int, Env] = {}
        self._rewards: dict[int, float] = {}

    @property
    def pool_size(self) -> int:
        """How many slots there are."""
        return self._pool_size

    def reset(self, index: int, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode in a slot."""
        self._rewards[index] = 0.0
        return self._env(index).reset(trajectory)

    def step(self, index: int, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Take an action in a slot; ``info`` tells the reward of the episode so far."""
        result = self._env(index).step(tool_name, arguments)
        self._rewards[index] = self._rewards.get(index, 0.0) + result.reward
        return StepResult(
            observation=result.observation,
            reward=result.reward,
            done=result.done,
            info={EPISODE_REWARD: self._rewards[index], **result.info},
        )

    def tools(self, index: int = 0) -> list[ToolInfo]:
        """The actions of a slot."""
        return self._env(index).tools()

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Rewards of whole conversations, as the first environment judges them."""
        return self._env(0).evaluate(trajectories, **kwargs)

    def get_adapters(self, n: int | None = None) -> list[EnvPoolAdapter]:
        """The first ``n`` slots as environments; all if omitted.

        Raises:
            InvalidInput: There are fewer.
        """
        wanted = self._pool_size if n is None else n
        if not 0 <= wanted <= self._pool_size:
            raise InvalidInput("n", f"is {wanted}; the pool has {self._pool_size} slots")
        return [EnvPoolAdapter(self, index) for index in range(wanted)]

    def close(self) -> None:
        """Close every environment, also where one of them fails; the first failure is raised at the end."""
        failures = []
        while self._envs:
            _, env = self._envs.popitem()
            try:
                env.close()
            except Exception as error:  # noqa: BLE001 - the others must be closed first
                failures.append(error)
        if failures:
            raise failures[0]

    def _env(self, index: int) -> Env:
        if not 0 <= index < self._pool_size:
            raise InvalidInput("index", f"is {index}; the pool has slots 0 to {self._pool_size - 1}")
        if index not in self._envs:
            self._envs[index] = self._make(**self._arguments)
        return self._envs[index]


class EnvPoolAdapter(Env):
    """One slot of a pool."""

    def __init__(self, pool: EnvPool, idx: int) -> None:
        self._pool = pool
        self._index = idx

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """See :class:`Env`."""
        return self._pool.reset(self._index, trajectory)

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """See :class:`Env`."""
        return self._pool.step(self._index, tool_name, arguments)

    def tools(self) -> list[ToolInfo]:
        """See :class:`Env`."""
        return self._pool.tools(self._index)

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """See :class:`Env`."""
        return self._pool.evaluate(trajectories, **kwargs)
