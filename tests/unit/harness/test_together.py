"""Files that share a service run in one process."""

from __future__ import annotations

from pathlib import Path

from harness.together import groups_of

ROOT = Path(__file__).parents[3]


def test_files_that_ask_for_one_service_are_together_and_those_with_their_own_are_not() -> None:
    groups = groups_of(ROOT)

    struck = {name for name, group in groups.items() if group == "tests/fault: struck"}
    assert {"tests/fault/test_crash_points.py", "tests/fault/test_jobs_killed.py"} <= struck
    assert groups["tests/fault/test_worker_killed.py"] == groups["tests/fault/test_fine_tuning_killed.py"]
    assert groups["tests/fault/test_worker_killed.py"] not in ("tests/fault: struck", None)
    assert groups["tests/acceptance/test_usage.py"] == groups["tests/acceptance/test_bad_input.py"]
    # Their services are their own.
    assert not {"tests/acceptance/test_native_client.py", "tests/fault/test_two_workers.py"} & set(groups)
