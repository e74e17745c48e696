"""The benchmarks are scripts beside each other, so their folder is where they import from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="session", autouse=True)
def benchmarks_path() -> Iterator[Path]:
    """Makes the benchmarks importable for these tests only."""
    sys.path.insert(0, str(BENCHMARKS))
    yield BENCHMARKS
    sys.path.remove(str(BENCHMARKS))
