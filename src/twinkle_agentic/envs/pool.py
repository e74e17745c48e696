"""Many environments of one kind: a slot for each trajectory of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from twinkle.core.errors import InvalidInput
from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle.data_format.conversation import Trajectory
from twinkle.infra.remote import remote_class, remote_function
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EPISODE_REWARD
from twinkle_agentic.envs.openenv import OpenEnv


def to_owner(count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A dispatch to the worker that has a slot, which are dealt out in turn; the others are told of none."""
    index, *more = args
    return [((index if index % count == rank else None, *more), kwargs) for rank in range(count)]


def of_owner(results: Sequence[Any]) -> Any:
    """The result of the worker that has the slot."""
    return next(result for result in results if result is not None)


@remote_class()
class EnvPool:
    """Environments by number, each made when it is first used.

    Args:
        pool_size: How many.
        env_cls: What makes one; OpenEnv's if omitted. On a group it is made, and makes them, on the workers.
        env_kwargs: Its arguments.
        remote_group: The group of devices on whose workers the environments are, dealt out in turn; with Ray.
        device_mesh: Taken for the sake of scripts: an environment is on one worker, whatever the mesh.
    """

    meets_other_ranks = False

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
        return self.num_slots()

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def num_slots(self) -> int:
        """How many slots there are."""
        return self._pool_size

    def reset(self, index: int, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode in a slot."""
        result: StepResult = self.in_slot(index, "reset", trajectory)
        return result

    def step(self, index: int, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Take an action in a slot; ``info`` tells the reward of the episode so far."""
        result: StepResult = self.in_slot(index, "step", tool_name, arguments)
        return result

    def tools(self, index: int = 0) -> list[ToolInfo]:
        """The actions of a slot."""
        found: list[ToolInfo] = self.in_slot(index, "tools")
        return found

    @remote_function(dispatch=to_owner, collect=of_owner, lazy_collect=False)
    def in_slot(self, index: int | None, call: Literal["reset", "step", "tools"], *args: Any) -> Any:
        """Call the environment of a slot, where it is; without a slot nothing happens, as it is on another worker."""
        if index is None:
            return None
        result = getattr(self._env(index), call)(*args)
        if call == "tools":
            return result
        if call == "reset":
            self._rewards[index] = 0.0
            return result
        self._rewards[index] = self._rewards.get(index, 0.0) + result.reward
        return replace(result, info={EPISODE_REWARD: self._rewards[index], **result.info})

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Rewards of whole conversations, as the first environment judges them."""
        return self._env(0).evaluate(trajectories, **kwargs)

    def get_adapters(self, n: int | None = None) -> list[EnvPoolAdapter]:
        """The first ``n`` slots as environments; all if omitted.

        Raises:
            InvalidInput: There are fewer.
        """
        size = self.pool_size
        wanted = size if n is None else n
        if not 0 <= wanted <= size:
            raise InvalidInput("n", f"is {wanted}; the pool has {size} slots")
        return [EnvPoolAdapter(self, index) for index in range(wanted)]

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
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
