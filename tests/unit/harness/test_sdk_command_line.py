"""A command line of the SDK that ends badly, and what a test is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.sdk_command_line import run_tinker

SCRIPT = """#!/bin/sh
echo again >> starts
echo "$TINKER_BASE_URL $*"
echo "a reason" >&2
[ $(wc -l < starts) -gt {num_failures} ] || {failure}
"""


def run(home: Path, *, num_failures: int, failure: str = "kill -ABRT $$") -> str:
    python = home / "python"
    python.write_text(SCRIPT.format(num_failures=num_failures, failure=failure))
    python.chmod(0o755)
    return run_tinker("run", "list", base_url="http://here", api_key="tml-mine", home=home, python=python)


def num_starts(home: Path) -> int:
    return len((home / "starts").read_text().splitlines())


def test_one_that_was_aborted_is_started_again(tmp_path: Path) -> None:
    assert run(tmp_path, num_failures=2) == "http://here -m tinker.cli run list\n"
    assert num_starts(tmp_path) == 3


def test_one_that_is_aborted_each_time_fails_with_all_that_it_said(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)run list ended with -6.*http://here.*a reason"):
        run(tmp_path, num_failures=3)
    assert num_starts(tmp_path) == 3


@pytest.mark.parametrize(("failure", "code"), [("exit 1", "1"), ("kill -SEGV $$", "-11")])
def test_any_other_failure_is_told_at_once(tmp_path: Path, failure: str, code: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)ended with {code}\n.*http://here.*a reason"):
        run(tmp_path, num_failures=1, failure=failure)
    assert num_starts(tmp_path) == 1
