"""A recipe that learns from rewards, unmodified, earns more the longer it trains."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from harness.cookbook import GSM8K, MODEL_NAME, as_problem, column, make_offline_data, read_chats, write_rows

from .conftest import Recipe

NUM_STEPS = 12
BATCH_SIZE = 4

pytestmark = [pytest.mark.cookbook, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def offline(tmp_path: Path, tiny_model: Path) -> Path:
    """Only problems whose answer is 6, as often as it takes."""
    folder = make_offline_data(tmp_path / "offline", model_name=MODEL_NAME, tokenizer_folder=tiny_model)
    problems = [as_problem(chat) for chat in read_chats("arithmetic.jsonl")]
    answered_6 = [problem for problem in problems if problem["answer"].endswith("#### 6")]
    num_rows = NUM_STEPS * BATCH_SIZE
    write_rows(folder / GSM8K / "main" / "train.jsonl", (answered_6 * num_rows)[:num_rows])
    return folder


def test_rl_loop_comes_to_give_the_answer_that_is_rewarded(recipe: Recipe, five_or_six: str, log_path: Path) -> None:
    write_rows(log_path / "checkpoints.jsonl", [{"name": "taught", "batch": 0, "state_path": five_or_six}])
    sizes = (f"batch_size={BATCH_SIZE}", "group_size=8", "max_tokens=24", "save_every=0")

    steps = recipe("rl_loop", *sizes, "learning_rate=1e-3", "loss_fn=importance_sampling", timeout_s=500)

    rewards = column(steps, "reward/total")
    third = NUM_STEPS // 3
    # About half of the answers are right before the first step, and nearly all when only 6 is left. The recipe gives no
    # seeds, so two runs differ: a third has 128 answers, whose mean is off by 0.04 (one standard deviation) at a half.
    # Measured: from 0.59 to 0.96.
    assert len(rewards) == NUM_STEPS
    assert statistics.fmean(rewards[-third:]) > statistics.fmean(rewards[:third]) + 0.2
