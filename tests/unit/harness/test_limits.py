"""What goes wrong fails alone: a test or a fixture that takes too long, a failure that is hard to tell of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
INI = """
[pytest]
timeout = 1
timeout_func_only = true
fixture_timeout = 1
asyncio_mode = auto
"""
CONFTEST = """
import ast
import time
import pytest

@pytest.fixture
def parser_that_fails(monkeypatch):
    # As CPython's does before 3.11.8 when two threads parse at the same time.
    def fail(*args, **kwargs):
        raise SystemError("AST constructor recursion depth mismatch")
    monkeypatch.setattr(ast, "parse", fail)

def pytest_runtest_logreport(report):
    # A machine so busy that pytest itself needs longer than a test may take.
    if report.when == "teardown" and "swift" in report.nodeid:
        time.sleep(1.5)
"""
SAMPLE = """
import threading
import pytest

def hang():
    threading.Event().wait()

@pytest.fixture
def hangs_at_start():
    hang()

@pytest.fixture
def hangs_at_end():
    yield
    hang()

@pytest.fixture(scope="module")
def shared_hangs_at_end():
    yield "shared"
    hang()

@pytest.fixture
async def coroutine_hangs_at_end(shared_hangs_at_end):
    yield shared_hangs_at_end
    hang()

def test_swift(): pass
def test_hangs(): hang()
def test_one_whose_fixture_does_not_start(hangs_at_start): pass
def test_one_whose_fixture_does_not_end(hangs_at_end): pass
def test_one_whose_coroutine_does_not_end(coroutine_hangs_at_end): pass
def test_one_that_asks_within(request): request.getfixturevalue("hangs_at_start")
def test_whose_failure_is_hard_to_tell(parser_that_fails): assert [] == ["told all the same"]
def test_last_of_the_module(): pass
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_swift_too.py").write_text("def test_swift_in_another_module(): pass\n")
    return tmp_path


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["one", "two"])
def test_what_goes_wrong_fails_alone_and_the_run_goes_on_to_its_end(sample: Path, workers: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "harness.limits", "-p", "no:cacheprovider", "-v", *workers]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=sample, env={**environment, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True, timeout=280
    )

    assert "INTERNALERROR" not in done.stdout + done.stderr
    failed = {line.split(" ")[1].partition("::")[2] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_hangs", "test_one_that_asks_within", "test_whose_failure_is_hard_to_tell"}
    broken = {line.split(" ")[1].partition("::")[2] for line in done.stdout.splitlines() if line.startswith("ERROR")}
    assert broken == {
        "test_one_whose_fixture_does_not_start",
        "test_one_whose_fixture_does_not_end",
        "test_one_whose_coroutine_does_not_end",
        "test_last_of_the_module",
    }
    assert "3 failed, 5 passed" in done.stdout and "4 errors in" in done.stdout
    assert "told all the same" in done.stdout
    assert "6 stopped by a time limit" in done.stdout
    assert "the end of fixture 'shared_hangs_at_end' took longer than 1 s" in done.stdout
