"""Scripts that learn from what they sample, on groups of devices that Ray places: the documents' and our own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.hub_world import HubWorld
from harness.opened_checkpoint import assert_same_in_peft
from harness.script_run import Run, run_script
from harness.seeds import Script

pytest.importorskip("ray", reason="the extra twinkle-queue[ray] is not installed")

COOKBOOK = Path(__file__).resolve().parents[3] / "cookbook" / "rl"
TIME_LIMIT_S = 400.0
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
REWARDED = '''\
import twinkle.reward


class OddRows:
    """A tiny model never writes what is right; without differences there is nothing to learn."""

    def __call__(self, trajectories, ground_truths=None):
        return [float(sum(row["input_ids"]) % 2) for row in trajectories]


twinkle.reward.GSM8KAccuracyReward = OddRows
'''
DOCUMENTS = {"000:159": "qwen3_5", "002:218": "qwen3"}
"""Both GRPO scripts, and the class of the model that each names."""
SIZES = {
    "MODEL_GPUS": "1",
    "SAMPLER_GPUS": "1",
    "NUM_GENERATIONS": "4",
    "MAX_NEW_TOKENS": "8",
    "LR": "1e-2",
    "MAX_STEPS": "4",
    "BATCH_SIZE": "2",
    "MINI_BATCH_SIZE": "4",
}
RunScript = Callable[..., Run]


@pytest.fixture
def run_cookbook(world: HubWorld, tmp_path: Path) -> RunScript:
    """Runs a script of the cookbook in this test's folder."""

    def run(name: str, **settings: str) -> Run:
        text = REWARDED + (COOKBOOK / name).read_text()
        environment = {**world.environment, **RAY, "LEARNING_RATE": "1e-3", **settings}
        return run_script(text, tmp_path, environment, time_limit_s=TIME_LIMIT_S)

    return run


@pytest.mark.timeout(TIME_LIMIT_S)
def test_one_group_answers_with_what_the_other_has_learned(run_cookbook: RunScript, world: HubWorld) -> None:
    run = run_cookbook(
        "grpo/grpo.py",
        **{"MODEL_GPUS": "1", "SAMPLER_GPUS": "1", "NUM_ROWS": "16", "BATCH_SIZE": "2", "NUM_GENERATIONS": "4"},
        **{"MINI_BATCH_SIZE": "4", "MAX_STEPS": "4", "MAX_NEW_TOKENS": "8"},
    )

    assert [(told.step, told.metrics["weights"]) for told in run.progress] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert_it_learned(run, world.model("qwen3_5"), "grpo")


@pytest.mark.soak
@pytest.mark.timeout(TIME_LIMIT_S)
def test_several_ranks_answer_and_learn(run_cookbook: RunScript, world: HubWorld) -> None:
    run = run_cookbook(
        "grpo/grpo.py",
        **{"MODEL_GPUS": "2", "SAMPLER_GPUS": "2", "NUM_ROWS": "16", "BATCH_SIZE": "2", "NUM_GENERATIONS": "4"},
        **{"MINI_BATCH_SIZE": "4", "MAX_STEPS": "4", "MAX_NEW_TOKENS": "8"},
    )

    assert_it_learned(run, world.model("qwen3_5"), "grpo")


@pytest.mark.soak
@pytest.mark.timeout(TIME_LIMIT_S)
def test_preferences_widen_on_several_ranks(run_cookbook: RunScript, world: HubWorld) -> None:
    run = run_cookbook(
        "dpo/dpo_lora.py",
        **{"MODEL_GPUS": "2", "DP_SIZE": "2", "NUM_ROWS": "24", "BATCH_SIZE": "4", "LOG_EVERY": "1"},
        LEARNING_RATE="1e-2",
    )

    margins = [float(told.metrics["rewards/margins"]) for told in run.progress]
    assert margins[0] == pytest.approx(0, abs=1e-3) and margins[-1] > margins[0]
    assert_it_learned(run, world.model("qwen3"), "dpo_lora")


@pytest.mark.soak
@pytest.mark.timeout(TIME_LIMIT_S)
def test_a_student_comes_nearer_to_its_teacher(run_cookbook: RunScript, world: HubWorld) -> None:
    run = run_cookbook(
        "gkd/gkd_on_policy.py",
        **{"MODEL_GPUS": "2", "SAMPLER_GPUS": "1", "TEACHER_GPUS": "1", "NUM_ROWS": "32", "BATCH_SIZE": "4"},
        **{"MAX_STEPS": "6", "MAX_NEW_TOKENS": "8", "GKD_TOPK": "8"},
        LEARNING_RATE="1e-2",
    )

    losses = [told.loss for told in run.progress]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]
    assert_it_learned(run, world.model("qwen3"), "gkd_on_policy")


@pytest.mark.soak
@pytest.mark.timeout(TIME_LIMIT_S)
def test_whole_conversations_are_learnt_from(run_cookbook: RunScript, world: HubWorld) -> None:
    run = run_cookbook(
        "multi_turn/multi_turn_grpo.py",
        **{"MODEL_GPUS": "1", "SAMPLER_GPUS": "2", "BATCH_SIZE": "2", "NUM_GENERATIONS": "2", "MAX_TURNS": "2"},
        **{"MAX_STEPS": "2", "MAX_NEW_TOKENS": "8", "MAX_LENGTH": "1024"},
    )

    assert [told.metrics["weights"] for told in run.progress] == [1, 2]
    assert all(1 <= told.metrics["turns"] <= 2 for told in run.progress)
    assert (run.folder / "output" / "multi_turn_grpo" / "last-checkpoint").is_dir()


@pytest.mark.soak
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.timeout(TIME_LIMIT_S)
def test_the_documents_script_samples_rewards_learns_and_saves(
    scripts: list[Script], world: HubWorld, tmp_path: Path, name: str
) -> None:
    text = next(script.text for script in scripts if script.name == name)

    run = run_script(REWARDED + text, tmp_path, {**world.environment, **RAY, **SIZES}, time_limit_s=TIME_LIMIT_S)

    steps = re.findall(r"^\[Step (\d)/4\] (\{.*\})$", run.output, re.MULTILINE)
    assert [step for step, _ in steps] == ["1", "2", "3"]
    assert "Training completed. optim_steps=4" in run.output
    assert_same_in_peft(world.model(DOCUMENTS[name]), run.folder / "output" / "grpo-gsm8k-checkpoint")


def assert_it_learned(run: Run, base: Path, name: str) -> None:
    """The checkpoint opens in plain PEFT, and its adapter does something."""
    checkpoint = run.folder / "output" / name / "last-checkpoint"
    assert_same_in_peft(base, checkpoint)
