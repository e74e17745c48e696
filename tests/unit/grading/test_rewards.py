"""Rewards of jobs: computed in processes of their own, within bounds, whatever a tenant or a model wrote."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from twinkle.grading.grade import GraderFailed, ProblemKind, RewardRequest
from twinkle.grading.rewards import RewardProcesses
from twinkle.wire.bodies.graders import FORMAT_REWARDS, RewardGrader
from twinkle.workers.jobs.reward_process import score

ENDLESS = RewardRequest(reward="regexp", pattern="(a|aa)+$", text="a" * 60 + "!")


@pytest_asyncio.fixture
async def rewards() -> AsyncIterator[RewardProcesses]:
    made = RewardProcesses(seconds=1.0)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (RewardRequest(reward="arithmetic", text="3+4=7", truth="7"), 1.0),
        (RewardRequest(reward="arithmetic", text="so it is 8.", truth="7"), 0.0),
        (RewardRequest(reward="gsm8k", text="#### 1,234", truth="1234"), 1.0),
        (RewardRequest(reward="format", text="<think>a</think><answer>b</answer>"), 1.0),
        (RewardRequest(reward="regexp", text="Answer: 42", pattern=r"answer: (\d+)", ignore_case=True), 1.0),
        (RewardRequest(reward="regexp", text="Answer: 42", pattern=r"(\d+)", group=1, truth="42"), 1.0),
        (RewardRequest(reward="regexp", text="Answer: 42", pattern=r"(\d+)", group=1, truth="43"), 0.0),
        (RewardRequest(reward="regexp", text="none", pattern=r"\d"), 0.0),
    ],
)
def test_a_reward_is_the_librarys(request_: RewardRequest, expected: float) -> None:
    assert score(request_) == expected


def test_every_reward_that_a_grader_may_name_is_there() -> None:
    names = RewardGrader.model_fields["reward"].annotation.__args__  # type: ignore[union-attr]

    for name in names:
        truth = None if name in FORMAT_REWARDS else "1"
        assert 0 <= score(RewardRequest(reward=name, text="\\boxed{1} <answer>1</answer> #### 1", truth=truth)) <= 1


async def test_a_search_without_end_is_given_up_and_the_next_answer_is_judged(rewards: RewardProcesses) -> None:
    assert await rewards.grade("a", RewardRequest(reward="arithmetic", text="7", truth="7")) == 1.0

    started = time.monotonic()
    with pytest.raises(GraderFailed) as given_up:
        await rewards.grade("a", ENDLESS)

    assert given_up.value.kind is ProblemKind.TIMEOUT
    assert time.monotonic() - started < 20
    assert await rewards.grade("a", RewardRequest(reward="arithmetic", text="8", truth="7")) == 0.0


async def test_what_a_reward_cannot_judge_is_told_and_ends_nothing(rewards: RewardProcesses) -> None:
    with pytest.raises(GraderFailed) as failed:
        await rewards.grade("a", RewardRequest(reward="regexp", text="x", pattern="("))

    assert failed.value.kind is ProblemKind.OTHER
    assert await rewards.grade("a", RewardRequest(reward="format", text="x")) == 0.0


async def test_one_tenants_endless_searches_leave_the_others_a_process(rewards: RewardProcesses) -> None:
    await asyncio.gather(*[rewards.grade(name, RewardRequest(reward="format", text="x")) for name in ("a", "b")])
    slow = [asyncio.create_task(rewards.grade("hostile", ENDLESS)) for _ in range(3)]
    await asyncio.sleep(0)

    assert await rewards.grade("other", RewardRequest(reward="arithmetic", text="7", truth="7")) == 1.0

    assert not any(task.done() for task in slow[1:])
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
