"""Recipes that learn from conversations and preferences, unmodified, against a whole service."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cookbook import CONVERSATIONS, SL_LOOP_ARGUMENTS, column, read_rows
from harness.served import Served

from .conftest import Recipe

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]


def test_sl_loop_trains_saves_and_resumes(recipe: Recipe, served_as_qwen: Served) -> None:
    recipe("sl_loop", *SL_LOOP_ARGUMENTS)
    steps = recipe("sl_loop", *SL_LOOP_ARGUMENTS)

    losses = column(steps, "train_mean_nll")
    assert losses[0] > losses[2]
    saved = served_as_qwen.query("SELECT kind, name FROM checkpoint WHERE listed ORDER BY kind, name")
    assert ("training", "final") in saved
    assert ("sampler", "final") in saved


@pytest.mark.soak
def test_sl_basic_scores_held_out_chats_with_its_sampler(recipe: Recipe) -> None:
    # Nine of its steps: it evaluates at the first and at the ninth.
    steps = recipe("sl_basic", "learning_rate=1e-2", "lora_rank=8", "max_steps=9")

    scores = column(steps, "test/nll")
    # What has learned nothing finds all chats about as likely, in the trainer and in the sampler.
    assert scores[0] == pytest.approx(column(steps, "train_mean_nll")[0], rel=0.03)
    assert scores[1] < 0.6 * scores[0]


@pytest.mark.soak
def test_chat_sl_learns_and_rolls_its_checkpoints(recipe: Recipe, served_as_qwen: Served, log_path: Path) -> None:
    arguments = (f"dataset={CONVERSATIONS}", "lora_rank=8", "batch_size=8", "learning_rate=1e-3", "max_steps=6")

    steps = recipe("chat_sl.train", *arguments, "rolling_save_every=1", "save_every=3")

    losses = column(steps, "train_mean_nll")
    assert losses[-1] < losses[0]
    (final,) = (row for row in read_rows(log_path / "checkpoints.jsonl") if row["name"] == "final")
    saved = served_as_qwen.query(
        "SELECT name FROM checkpoint WHERE listed AND path LIKE ?", final["state_path"].removesuffix("final") + "%"
    )
    assert sorted(saved) == [("000003",), ("final",)]


@pytest.mark.soak
def test_dpo_comes_to_prefer_what_was_chosen(recipe: Recipe) -> None:
    steps = recipe("preference.dpo.train", "renderer_name=qwen3", "batch_size=8", "learning_rate=1e-3", "max_steps=4")

    # With the reference's own weights there is nothing to choose.
    assert column(steps, "dpo_loss")[0] == pytest.approx(0.693147, abs=1e-4)
    assert column(steps, "dpo_loss")[-1] < 0.6
    assert column(steps, "margin")[-1] > 0
