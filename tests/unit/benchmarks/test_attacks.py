"""Floods, with a victim beside them: its steps go on, its heartbeats are answered, and the memory comes back."""

from __future__ import annotations

import importlib

import pytest

MOST_TIMES_SLOWER = 50
"""Steps of an engine that computes nothing take milliseconds: beside them twice the time is nothing."""
MIB_OF_BODIES = 1024
"""What bodies of everybody may take in the API, by default."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_under_each_flood_another_tenant_steps_on_and_nothing_is_left_of_it_afterwards() -> None:
    attacks = importlib.import_module("attacks")
    cells = attacks.measure(attacks.SHORT)["cells"]

    assert [cell["attack"] for cell in cells] == list(attacks.ATTACKS)
    for cell in cells:
        before, during, after = cell["before"], cell["during"], cell["after"]
        # One step and one heartbeat after the other: whoever waited long for either has made few of both.
        assert during["num_steps"] * MOST_TIMES_SLOWER >= before["num_steps"], cell
        assert after["step_p50_ms"] <= 2 * before["step_p50_ms"], cell
        was, under, is_now = cell["mib"]["api"]
        assert under <= was + MIB_OF_BODIES, cell
        assert is_now <= was + MIB_OF_BODIES // 4, cell
