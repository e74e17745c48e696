"""The arithmetic example's task: what is held out, what is right, and what the trainer gets; and its plot."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("arithmetic_task")


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("arithmetic_plot")


def test_every_sum_from_4_to_9_is_either_trained_on_or_held_out(task: ModuleType) -> None:
    split = task.split_problems(num_heldout=9, seed=0)

    problems = [*split.training, *split.heldout]
    assert {(p.a, p.b) for p in problems} == {(a, b) for a in range(10) for b in range(10) if 4 <= a + b <= 9}
    assert len(problems) == 45
    assert len(split.heldout) == 9
    assert split == task.split_problems(num_heldout=9, seed=0)
    assert split != task.split_problems(num_heldout=9, seed=1)


def test_chance_is_how_often_the_answer_to_another_sum_is_right(task: ModuleType) -> None:
    training = tuple(task.Problem(a, b) for a, b in ((0, 5), (2, 3), (4, 4)))

    # Each 5 is hit by two draws of three, the 8 by one.
    assert task.Split(training, heldout=()).chance == pytest.approx((2 + 2 + 1) / 9)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("12", 12),
        ("007", 7),
        ("", None),
        (" 7", None),
        ("7.", None),
        ("-7", None),
        ("1 2", None),
        ("٧", None),
    ],
)
def test_an_answer_is_digits_and_nothing_else(task: ModuleType, text: str, number: int | None) -> None:
    assert task.parse_answer(text) == number


def test_only_the_right_number_with_its_turn_ended_is_rewarded(task: ModuleType) -> None:
    problem = task.Problem(5, 7)

    assert task.reward(problem, "12", ended=True) == 1.0
    assert task.reward(problem, "12", ended=False) == 0.0
    assert task.reward(problem, "13", ended=True) == 0.0
    assert task.reward(problem, "12!", ended=True) == 0.0


def test_advantages_are_centred_in_their_group_and_as_large_as_answers_are_rare(task: ModuleType) -> None:
    assert task.advantages([1.0, 0.0, 0.0, 0.0, 0.0]) == pytest.approx([2.0, -0.5, -0.5, -0.5, -0.5])
    assert task.advantages([1.0, 0.0]) == pytest.approx([1.0, -1.0])
    assert task.advantages([1.0, 1.0]) == [0.0, 0.0]


def test_a_lesson_teaches_the_answer_and_nothing_of_the_prompt(task: ModuleType) -> None:
    datum = task.lesson_datum([1, 2, 3], [8, 9])

    inputs = {name: list(tensor.data) for name, tensor in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == [1, 2, 3, 8]
    assert inputs == {"target_tokens": [2, 3, 8, 9], "weights": [0.0, 0.0, 1.0, 1.0]}


def test_the_trainer_is_given_the_answer_with_its_logprobs_and_nothing_on_the_prompt(task: ModuleType) -> None:
    datum = task.policy_datum([1, 2, 3], [8, 9], [-0.5, -0.25], advantage=0.75)

    inputs = {name: list(tensor.data) for name, tensor in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == [1, 2, 3, 8]
    assert inputs["target_tokens"] == [2, 3, 8, 9]
    assert inputs["logprobs"] == [0.0, 0.0, -0.5, -0.25]
    assert inputs["advantages"] == [0.0, 0.0, 0.75, 0.75]


def test_the_plot_shows_mean_least_and_greatest_of_the_tenants(plot: ModuleType) -> None:
    rows = [
        {"seed": 1, "step": 0, "reward": 0.2, "heldout_reward": 0.1},
        {"seed": 2, "step": 0, "reward": 0.4, "heldout_reward": None},
        {"seed": 1, "step": 1, "reward": 0.6, "heldout_reward": None},
    ]

    half = pytest.approx(0.4)
    assert plot.curve(rows, "reward") == plot.Curve([0, 1], [pytest.approx(0.3), 0.6], [0.2, 0.6], [0.4, 0.6])
    assert plot.curve(rows, "reward", num_steps=2) == plot.Curve([0.5], [half], [half], [half])
    assert plot.curve(rows, "heldout_reward") == plot.Curve([0], [0.1], [0.1], [0.1])


def test_the_shipped_plot_can_be_drawn_again_from_the_shipped_metrics(plot: ModuleType, tmp_path: Path) -> None:
    shipped = EXAMPLES / "results" / "arithmetic_rl.jsonl"
    settings, *rows = plot.read_rows(shipped)

    drawn = plot.draw_file(shipped, tmp_path / "again.png")

    assert drawn.read_bytes().startswith(b"\x89PNG")
    steps = range(settings["plan"]["steps"] + 1)
    assert sorted((row["seed"], row["step"]) for row in rows) == [(s, n) for s in settings["seeds"] for n in steps]
