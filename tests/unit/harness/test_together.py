"""Files that share a service run in one process, and the death of one process ends one test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.together import groups_of

ROOT = Path(__file__).parents[3]
DIES = """
import os
def test_before(): pass
def test_dies(): os._exit(1)
def test_after(): pass
"""
PASSES = "def test_one(): pass"


def test_files_that_ask_for_one_service_are_together_and_those_with_their_own_are_not() -> None:
    groups = groups_of(ROOT)

    struck = {name for name, group in groups.items() if group == "tests/fault: struck"}
    assert {"tests/fault/test_crash_points.py", "tests/fault/test_jobs_killed.py"} <= struck
    assert groups["tests/fault/test_worker_killed.py"] == groups["tests/fault/test_fine_tuning_killed.py"]
    assert groups["tests/fault/test_worker_killed.py"] not in ("tests/fault: struck", None)
    assert groups["tests/acceptance/test_usage.py"] == groups["tests/acceptance/test_bad_input.py"]
    # Their services are their own.
    assert not {"tests/acceptance/test_native_client.py", "tests/fault/test_two_workers.py"} & set(groups)


@pytest.mark.parametrize("num_files", [0, 4])
def test_the_death_of_a_process_fails_the_test_that_it_ran_and_no_other_is_lost_or_run_again(
    num_files: int, tmp_path: Path
) -> None:
    for number in range(num_files):
        (tmp_path / f"test_{number}.py").write_text(PASSES)
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(DIES)
    options = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--rootdir", str(tmp_path), "-q"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "harness.together", "-p", "no:cacheprovider", *options, str(tmp_path)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert f"2 failed, {num_files + 4} passed" in done.stdout, done.stdout + done.stderr
    assert all(f"crashed while running 'test_{name}.py::test_dies'" in done.stdout for name in ("a", "b"))
