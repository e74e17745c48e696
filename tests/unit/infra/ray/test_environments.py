"""Environments of a pool on the workers of a group."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.infra.remote import is_remote
from twinkle_agentic.envs import Env, EnvPool, EnvTool, StepResult

pytestmark = pytest.mark.usefixtures("on_ray")


class Counting(Env):
    """Says where it is, and how often it was asked in this episode; of a script, so no worker can import it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.count = 0

    def reset(self, trajectory: Any = None) -> StepResult:
        self.count = 0
        return StepResult(observation=f"{os.getpid()} {trajectory}")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.count += arguments["by"]
        return StepResult(observation=f"{tool_name} {self.count}", reward=float(self.count), done=self.count > 2)

    def tools(self) -> list[Any]:
        return [{"type": "function", "function": {"name": "count", "description": "", "parameters": {}}}]

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [float(len(trajectory["messages"])) for trajectory in trajectories]

    def close(self) -> None:
        (Path(self.folder) / f"closed-{os.getpid()}-{id(self)}").touch()


def test_environments_of_a_pool_are_dealt_out_to_the_workers_of_its_group_and_used_as_here(tmp_path: Path) -> None:
    pool = EnvPool(3, Counting, {"folder": str(tmp_path)}, remote_group="model")
    adapters = pool.get_adapters()

    processes = [env.reset({"messages": []}).observation.split()[0] for env in adapters]  # type: ignore[typeddict-item]
    assert is_remote(pool) and pool.pool_size == len(adapters) == 3
    assert processes[0] == processes[2] != processes[1] and str(os.getpid()) not in processes

    assert adapters[1].step("count", {"by": 2}).info == {"episode_reward": 2.0}
    assert [env.step("count", {"by": 1}).observation for env in adapters] == ["count 1", "count 3", "count 1"]
    told = pool.step(index=1, tool_name="count", arguments={"by": 0})
    assert told.done and told.info == {"episode_reward": 8.0}
    (tool,) = EnvTool.from_env(adapters[2])
    tool("count", {"by": 1})
    assert tool.episode_reward == 3.0
    assert pool.evaluate([{"messages": [1, 2]}]) == [2.0]  # type: ignore[list-item]

    # As a rollout does, which calls the tools of all conversations at once.
    steps = [(env, number) for number in range(1, 11) for env in adapters for _ in range(3)]
    with ThreadPoolExecutor(9) as threads:
        counts = list(threads.map(lambda each: each[0].step("count", {"by": 1}).observation, steps))
    assert sorted(counts) == sorted(f"count {start + more}" for start in (1, 3, 2) for more in range(1, 31))

    with pytest.raises(InvalidInput, match="slots 0 to 2"):
        pool.reset(3)
    with pytest.raises(InvalidInput, match="the pool has 3 slots"):
        pool.get_adapters(4)
    with pytest.raises(KeyError, match="by") as raised:
        adapters[1].step("count", {})
    assert any("rank 1" in note and "EnvPool.in_slot" in note for note in raised.value.__notes__)
    pool.close()
    assert len(list(tmp_path.glob("closed-*"))) == 3
