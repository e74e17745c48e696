"""Which members a sweep has."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs_sweep import ParameterRange, SweepMode, SweepSpec, Value
from twinkle.wire.sweeps import Member, members_of


def grid(**parameters: list[Value] | ParameterRange) -> list[Member]:
    return members_of(parameters, mode=SweepMode.GRID, runs=None, seed=0)


def drawn(runs: int, seed: int = 0, **parameters: list[Value] | ParameterRange) -> list[Member]:
    return members_of(parameters, mode=SweepMode.RANDOM, runs=runs, seed=seed)


def test_a_grid_has_every_combination_and_the_last_parameter_changes_first() -> None:
    members = grid(rank=[8, 16], loss=["a", "b", "c"])
    assert [member.label for member in members] == [
        "rank=8,loss=a",
        "rank=8,loss=b",
        "rank=8,loss=c",
        "rank=16,loss=a",
        "rank=16,loss=b",
        "rank=16,loss=c",
    ]
    assert [member.index for member in members] == list(range(6))


def test_ranges_hold_both_ends_and_are_spaced_evenly_on_their_scale() -> None:
    members = grid(lr=ParameterRange(scale="log", low=1e-5, high=1e-3, count=5))
    assert [member.values["lr"] for member in members] == [1e-5, 3.16228e-5, 1e-4, 3.16228e-4, 1e-3]
    members = grid(dropout=ParameterRange(scale="lin", low=0.0, high=0.2, count=3))
    assert [member.values["dropout"] for member in members] == [0.0, 0.1, 0.2]
    members = grid(rank=ParameterRange(scale="int", low=1, high=3, count=9))
    assert [member.values["rank"] for member in members] == [1, 2, 3]  # of a whole number there is one


def test_a_random_sweep_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    lr = ParameterRange(scale="log", low=1e-5, high=1e-3)
    first, again, other = drawn(8, lr=lr), drawn(8, lr=lr), drawn(8, seed=1, lr=lr)
    assert first == again
    assert [member.values for member in first] != [member.values for member in other]
    assert drawn(12, lr=lr)[:8] == first  # more runs go on where fewer ended


def test_random_choices_are_never_drawn_twice_and_all_of_them_are_the_grid() -> None:
    members = drawn(6, rank=[8, 16], loss=["a", "b", "c"])
    assert {member.label for member in members} == {member.label for member in grid(rank=[8, 16], loss=["a", "b", "c"])}
    with pytest.raises(InvalidInput, match="at most 6, as many as there are combinations, not 7"):
        drawn(7, rank=[8, 16], loss=["a", "b", "c"])


def test_more_than_a_thousand_members_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(InvalidInput, match=r'make 10000 members.*at most 1000.*"mode": "random"'):
        grid(a=list(range(100)), b=list(range(100)))
    assert len(drawn(1000, a=list(range(100)), b=list(range(100)))) == 1000


def test_a_grid_over_a_range_needs_a_count() -> None:
    with pytest.raises(InvalidInput, match=r"parameters\.lr\.count: is missing"):
        grid(lr=ParameterRange(scale="log", low=1e-5, high=1e-3))


@given(low=st.floats(1e-9, 1.0), factor=st.floats(1.5, 1e6), seed=st.integers(0, 1000))
def test_drawn_values_lie_in_their_range(low: float, factor: float, seed: int) -> None:
    high = low * factor
    for member in drawn(4, seed, lr=ParameterRange(scale="log", low=low, high=high)):
        value = member.values["lr"]
        assert isinstance(value, float)
        assert low <= value * (1 + 1e-5) and value <= high * (1 + 1e-5) and math.isfinite(value)
    for member in drawn(4, seed, rank=ParameterRange(scale="int", low=2, high=5)):
        assert member.values["rank"] in {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"lr": {"scale": "log", "low": 0.0, "high": 1.0}}, "above 0 on a logarithmic scale"),
        ({"lr": {"scale": "lin", "low": 1.0, "high": 1.0}}, "high must be above low"),
        ({"rank": {"scale": "int", "low": 1.5, "high": 3.0}}, "whole numbers for int"),
        ({"rank": []}, "at least 1 item"),
        ({}, "at least 1 item"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        SweepSpec.model_validate({"template": {"kind": "sft", "spec": {}}, "parameters": wrong})


def test_a_random_sweep_says_how_many_and_a_grid_does_not() -> None:
    sweep = {"template": {"kind": "sft", "spec": {}}, "parameters": {"rank": [8]}}
    with pytest.raises(ValidationError, match="runs is missing"):
        SweepSpec.model_validate({**sweep, "mode": "random"})
    with pytest.raises(ValidationError, match='runs is for "mode": "random"'):
        SweepSpec.model_validate({**sweep, "runs": 4})
