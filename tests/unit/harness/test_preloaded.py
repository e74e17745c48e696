"""A script in a forked process meets what it would meet in a fresh one, and its end is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import preloaded_process
from harness.preloaded import run_preloaded

LOOKS = """
import json, os, sys
ours = [name for name in sys.modules if name.partition(".")[0] in ("twinkle", "twinkle_client", "twinkle_agentic")]
class Own: pass
print(json.dumps({
    "name": __name__, "file": __file__, "arguments": sys.argv, "folder": os.getcwd(), "path": sys.path[:2],
    "environment": dict(os.environ), "stdin": sys.stdin.read(), "own": Own.__module__, "ours": ours,
    "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a text from a folder of its own."""

    def run(text: str, *, timeout_s: float = 120, **environment: str) -> tuple[int, str]:
        (tmp_path / "script.py").write_text(text)
        return run_preloaded(
            tmp_path / "script.py",
            {**os.environ, **environment},
            folder=tmp_path,
            arguments=("one", "two"),
            timeout_s=timeout_s,
        )

    return run


def test_a_script_finds_what_a_fresh_interpreter_would_show_it(run: Run, tmp_path: Path) -> None:
    code, said = run(LOOKS, OF_THE_TEST="it")

    fresh = subprocess.run(
        [sys.executable, tmp_path / "script.py", "one", "two"],
        cwd=tmp_path,
        env={**os.environ, "OF_THE_TEST": "it"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert code == 0
    assert said == fresh.stdout


def test_the_libraries_are_there_before_the_script_asks(run: Run) -> None:
    assert run(f"import sys\nassert set({preloaded_process.LIBRARIES!r}) <= set(sys.modules)") == (0, "")


def test_an_exception_is_told_and_a_script_leaves_nothing_to_the_next(run: Run) -> None:
    code, said = run("import os, twinkle\nos.environ['LEFT'] = 'here'\nprint('before')\nraise KeyError('what')")

    assert code == 1 and "before" in said and said.endswith("KeyError: 'what'\n") and "Traceback" in said
    assert run("import os, sys\nassert 'LEFT' not in os.environ and 'twinkle' not in sys.modules") == (0, "")


def test_what_takes_too_long_is_ended_and_the_next_one_runs(run: Run) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as ended:
        run("import signal\nprint('here', flush=True)\nsignal.pause()", timeout_s=1)

    assert ended.value.output == "here\n"
    assert run("print('on')") == (0, "on\n")
