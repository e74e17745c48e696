"""Recipes that learn from a teacher, unmodified, against a whole service."""

from __future__ import annotations

import math

import pytest

from harness.cookbook import MODEL_NAME, column

from .conftest import Recipe

# Student and teacher are one adapter, sampled token by token and scored at once, both in float32.
SAME_WEIGHTS_TOLERANCE = 1e-5
TOPK = 20
SDFT_ARGUMENTS = ("dataset=toolalpaca", "groups_per_batch=16", "lora_rank=8", "max_tokens=16", "eval_every=0")

pytestmark = [pytest.mark.cookbook, pytest.mark.soak, pytest.mark.timeout(600)]


def on_policy(recipe: Recipe, *arguments: str) -> list[float]:
    """Returns the divergence from the teacher at each step, in nats per token."""
    sizes = ("groups_per_batch=16", "group_size=4", "max_tokens=12", "lora_rank=8")
    steps = recipe(
        "distillation.on_policy_distillation", f"teacher_model={MODEL_NAME}", "eval_every=0", *sizes, *arguments
    )
    return column(steps, "teacher_kl")


def test_on_policy_distillation_comes_nearer_to_its_teacher(recipe: Recipe, five_or_six: str) -> None:
    # The teacher is the base model, which has no opinions; the student has one, and loses it.
    student = f"load_checkpoint_path={five_or_six}"

    divergences = on_policy(recipe, student, "learning_rate=5e-3", "max_steps=6")

    assert divergences[0] > 3
    assert divergences[-1] < divergences[0] / 2


def test_a_student_that_is_its_teacher_has_nothing_to_learn(recipe: Recipe, five_or_six: str) -> None:
    same = (f"teacher_checkpoint={five_or_six}", f"load_checkpoint_path={five_or_six}")

    divergences = on_policy(recipe, *same, "max_steps=1")

    assert divergences == pytest.approx([0.0], abs=SAME_WEIGHTS_TOLERANCE)


@pytest.mark.parametrize("way", ["forward", "reverse"])
def test_sdft_student_takes_after_its_teacher(recipe: Recipe, five_or_six: str, way: str) -> None:
    # The student gives its answer and stops; the base model, its teacher, hardly ever stops.
    student = (f"load_checkpoint_path={five_or_six}", "learning_rate=5e-3", "max_steps=6")

    steps = recipe("sdft.train", *SDFT_ARGUMENTS, *student, f"topk={TOPK}", f"reverse={way == 'reverse'}")

    assert all(0 < entropy <= math.log(TOPK) for entropy in column(steps, "sdft/mean_teacher_entropy"))
    if way == "reverse":
        divergences = column(steps, "sdft/reverse_kl_mean")
        assert 0 < divergences[-1] < 0.7 * divergences[0]
    else:
        lengths = column(steps, "env/all/ac_tokens_per_turn")
        assert lengths[-1] > lengths[0] + 2


def test_sdft_without_top_k_targets_sends_no_weights_and_is_served(recipe: Recipe, five_or_six: str) -> None:
    student = (f"load_checkpoint_path={five_or_six}", "learning_rate=5e-3", "max_steps=4")

    steps = recipe("sdft.train", *SDFT_ARGUMENTS, *student, "topk=0")

    # All weights are one, so it learns its own words and the questions alike.
    scores = column(steps, "sdft/mean_student_lp")
    assert len(scores) == 4
    assert all(math.isfinite(score) for score in scores)
