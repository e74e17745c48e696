"""Fixtures of the fault tests: whole services that are there to be broken, and tenants who remember."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.crashes import Crashes
from harness.models import make_text_model
from harness.served import Served
from harness.struck import MAX_OPEN, Struck


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("models") / "some" / "tiny")


@pytest.fixture(scope="package")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    """One embedded stack on the engine that computes nothing, for all the faults of all files."""
    folder = tmp_path_factory.mktemp("struck")
    crashes = Crashes(folder / "crashes")
    settings = {
        "TWINKLE_SNAPSHOT_EVERY_OPS": "7",
        "TWINKLE_INLINE_PAYLOAD_BYTES": "1024",
        # Its one tenant makes a few runs for every kill and ends none of their sessions.
        "TWINKLE_TENANT_MAX_ADAPTERS": "0",
        "TWINKLE_JOB_LEASE_S": "5",
    }
    with Served(folder / "home", model="null", flags=("--engine", "null"), **settings, **crashes.variables) as served:
        yield Struck(served, crashes)


@pytest.fixture(scope="package")
def struck_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Struck]:
    """One embedded stack on a real model, served as ``tiny``, for all the faults that its numbers are held against."""
    folder = tmp_path_factory.mktemp("struck-model")
    crashes = Crashes(folder / "crashes")
    settings = {
        "TWINKLE_SNAPSHOT_EVERY_OPS": "5",
        "TWINKLE_JOB_LEASE_S": "3",
        "TWINKLE_MAX_EPHEMERAL_WEIGHTS": str(MAX_OPEN),
        # Few, so that adapters and nameless weights have to leave memory and come back.
        "TWINKLE_MAX_RESIDENT_ADAPTERS": "3",
        **crashes.variables,
    }
    with Served(folder / "home", model=str(tiny_model), model_name="tiny", **settings) as served:
        yield Struck(served, crashes, model="tiny")
