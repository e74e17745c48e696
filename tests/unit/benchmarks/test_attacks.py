"""Floods, with a victim beside them: its steps go on, its heartbeats are answered, and the memory comes back."""

from __future__ import annotations

import importlib

import pytest

MOST_TIMES_SLOWER = 20
"""The median of the victim's steps and heartbeats: they take milliseconds, and the attacker works on the same cores."""
MOST_LEFT = 1.1
"""Of a process's memory after an attack, against before."""
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
        # Late is a step beyond twice its usual time and two seconds, and a heartbeat beyond one.
        assert (during["num_late_steps"], during["num_late_heartbeats"]) == (0, 0), cell
        assert (after["num_late_steps"], after["num_late_heartbeats"]) == (0, 0), cell
        for what in ("step_p50_ms", "heartbeat_p50_ms"):
            assert during[what] <= MOST_TIMES_SLOWER * before[what], cell
        assert after["step_p50_ms"] <= 2 * before["step_p50_ms"], cell
        was, under, _ = cell["mib"]["api"]
        assert under <= was + MIB_OF_BODIES, cell
        for role in ("api", "housekeeping"):
            was, _, is_now = cell["mib"][role]
            assert is_now <= MOST_LEFT * was, cell
