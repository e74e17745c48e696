"""What a call of pytest runs, and leaves to ``make soak`` and ``make gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = Path(__file__).parents[3] / "pyproject.toml"
SAMPLE = """
import pytest

def test_of_every_run(): pass

@pytest.mark.soak
def test_that_is_long(): pass

@pytest.mark.gpu
def test_of_a_device(): pass
"""


@pytest.mark.parametrize(("asked", "run"), [((), "test_of_every_run"), (("-m", "soak"), "test_that_is_long")])
def test_a_file_named_on_the_command_line_runs_what_the_whole_run_does(
    tmp_path: Path, asked: tuple[str, ...], run: str
) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-c", SETTINGS, "--collect-only", *asked, "test_sample.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )

    assert [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line] == [run]
