"""A pytest plugin: what is collected is never garbage, so the collector of cycles is not made to look through it.

Modules, tests and their parameters are a million objects that stay to the end: while they are made the collector would
go through them again and again, a quarter of the time that collecting takes, and later with every full round.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Off while there is nothing but growth; what is there afterwards is set aside for good."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
