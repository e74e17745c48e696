"""Recipes that learn from rewards, unmodified, against a whole service."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cookbook import column, read_rows, write_rows
from harness.served import Served

from .conftest import Recipe

# What the sampler says of its own tokens and what the trainer says of them, per token, both in float32.
SAMPLER_TOLERANCE = 1e-5
RL_LOOP_ARGUMENTS = ("batch_size=4", "group_size=8", "max_tokens=24", "save_every=1")
MATH_RL_ARGUMENTS = ("env=arithmetic", "groups_per_batch=4", "group_size=4", "max_tokens=24", "save_every=1")
RESUME = "behavior_if_log_dir_exists=resume"
# Four hundred games of ten turns, before the first step and after the last: eight thousand prompts of 850 tokens. Ten
# minutes on two idle cores are ample; there may be other work.
EVALUATION_S = 1800.0

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]


def test_rl_loop_resumes_samples_groups_and_trains_on_their_rewards(
    recipe: Recipe, five_or_six: str, log_path: Path
) -> None:
    write_rows(log_path / "checkpoints.jsonl", [{"name": "taught", "batch": 0, "state_path": five_or_six}])

    steps = recipe("rl_loop", *RL_LOOP_ARGUMENTS, "max_steps=2")

    # The first question's answer is 5, so some of its group are right and some are not.
    assert 0 < column(steps, "reward/total")[0] < 1
    assert column(steps, "grad_norm")[0] > 0


@pytest.mark.soak
@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop_trains_with_every_loss_it_offers(recipe: Recipe, five_or_six: str, log_path: Path, loss: str) -> None:
    write_rows(log_path / "checkpoints.jsonl", [{"name": "taught", "batch": 0, "state_path": five_or_six}])

    steps = recipe("rl_loop", *RL_LOOP_ARGUMENTS, "max_steps=1", f"loss_fn={loss}")

    assert column(steps, "grad_norm")[0] > 0


@pytest.mark.soak
def test_rl_loop_resumes_where_it_ended(recipe: Recipe, log_path: Path) -> None:
    recipe("rl_loop", *RL_LOOP_ARGUMENTS, "max_steps=2")
    (before,) = (row for row in read_rows(log_path / "checkpoints.jsonl") if row["name"] == "000001")
    write_rows(log_path / "checkpoints.jsonl", [before])

    steps = recipe("rl_loop", *RL_LOOP_ARGUMENTS, "max_steps=3")

    assert column(steps, "progress/batch") == [0, 1, 1, 2]


@pytest.mark.soak
def test_rl_basic_samples_two_thousand_replies_a_step(recipe: Recipe, five_or_six: str, served_as_qwen: Served) -> None:
    before = num_operations(served_as_qwen, "sample")

    steps = recipe(
        "rl_basic", f"load_checkpoint_path={five_or_six}", "lora_rank=8", "max_tokens=12", "max_steps=1", timeout_s=300
    )

    assert num_operations(served_as_qwen, "sample") - before == 128 * 16
    # It answers 5 or 6, which some of the questions want.
    assert 0 < column(steps, "env/all/correct")[0] < 0.5
    assert abs(column(steps, "optim/kl_sample_train_v1")[0]) < SAMPLER_TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("way", [(), ("max_steps_off_policy=2",)], ids=["in step", "off policy"])
def test_math_rl_steps_to_its_end_and_agrees_with_its_sampler(
    recipe: Recipe, five_or_six: str, way: tuple[str, ...]
) -> None:
    load = f"load_checkpoint_path={five_or_six}"

    steps = recipe("math_rl.train", *MATH_RL_ARGUMENTS, load, "lora_rank=8", "max_steps=3", *way)

    assert len(column(steps, "env/all/reward/total")) == 3
    assert column(steps, "env/all/format")[0] > 0.5
    # The first step is on policy either way.
    assert abs(column(steps, "optim/kl_sample_train_v1")[0]) < SAMPLER_TOLERANCE


@pytest.mark.soak
def test_math_rl_accumulates_minibatches_into_one_step(
    recipe: Recipe, five_or_six: str, served_as_qwen: Served
) -> None:
    load = f"load_checkpoint_path={five_or_six}"
    streamed = ("stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2")
    passes, updates = (num_operations(served_as_qwen, kind) for kind in ("forward_backward", "optim_step"))

    steps = recipe("math_rl.train", *MATH_RL_ARGUMENTS, load, "lora_rank=8", "max_steps=2", *streamed)

    assert num_operations(served_as_qwen, "forward_backward") - passes == 2 * 2
    assert num_operations(served_as_qwen, "optim_step") - updates == 2
    assert len(column(steps, "env/all/reward/total")) == 2
    assert abs(column(steps, "optim/kl_sample_train_v1")[0]) < SAMPLER_TOLERANCE


@pytest.mark.soak
def test_math_rl_off_policy_resumes_after_a_crash(recipe: Recipe, log_path: Path) -> None:
    arguments = (*MATH_RL_ARGUMENTS, "max_steps_off_policy=2", "eval_every=0", "max_steps=3", RESUME)
    recipe("math_rl.train", *arguments)
    checkpoints = log_path / "checkpoints.jsonl"
    write_rows(checkpoints, [row for row in read_rows(checkpoints) if row["name"] not in ("000003", "final")])

    steps = recipe("math_rl.train", *arguments)

    assert column(steps, "training_client/step") == [0, 1, 2, 2]
    assert [row["name"] for row in read_rows(checkpoints)][-1] == "final"


@pytest.mark.soak
def test_guess_number_plays_turn_by_turn(recipe: Recipe) -> None:
    arguments = ("batch_size=2", "group_size=2", "max_tokens=8", "max_steps=2", "save_every=1", "eval_every=0")

    steps = recipe("multiplayer_rl.guess_number.train", "renderer_name=qwen3_disable_thinking", *arguments)

    assert column(steps, "env/all/turns_per_episode") == [10.0, 10.0]
    assert column(steps, "env/all/reward/total") == [-10.0, -10.0]


@pytest.mark.soak
@pytest.mark.timeout(EVALUATION_S + 60)
def test_guess_number_evaluates_on_four_hundred_games(recipe: Recipe, served_as_qwen: Served) -> None:
    before = num_operations(served_as_qwen, "sample")

    steps = recipe(
        "multiplayer_rl.guess_number.train",
        # Ten turns of 64 tokens come near the end of the tiny model's context.
        *("renderer_name=qwen3_disable_thinking", "batch_size=2", "group_size=2", "max_tokens=48", "max_steps=1"),
        timeout_s=EVALUATION_S,
    )

    assert set(column(steps, "test/env/all/turns_per_episode")) == {10.0}
    # Four games for each of 103 numbers before the step and after it, two for each of two in the step, ten turns each.
    assert num_operations(served_as_qwen, "sample") - before == (2 * 103 * 4 + 2 * 2) * 10


@pytest.mark.soak
def test_shorter_compares_replies_in_pairs(recipe: Recipe) -> None:
    arguments = ("batch_size=2", "group_size=4", "max_tokens=8", "max_steps=2", "learning_rate=1e-3")

    steps = recipe("preference.shorter.train", "renderer_name=qwen3_disable_thinking", *arguments)

    assert column(steps, "env/all/by_group/frac_mixed")[0] > 0
    assert column(steps, "grad_norm")[0] > 0
    assert abs(column(steps, "optim/kl_sample_train_v1")[0]) < SAMPLER_TOLERANCE
    assert column(steps, "kl_pre_post_v2")[0] > 0


def num_operations(served: Served, kind: str) -> int:
    """How many operations of a kind have succeeded."""
    ((count,),) = served.query("SELECT count(*) FROM operation WHERE kind = ? AND state = 'done'", kind)
    return count
