"""Fixtures of the acceptance tests: whole services, real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.models import make_text_model
from harness.served import Served


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("models") / "some" / "tiny")


@pytest.fixture(scope="session")
def opened_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the server's disk that is open to the clients of the shared stack."""
    return tmp_path_factory.mktemp("opened")


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, opened_folder: Path) -> Iterator[Served]:
    """One embedded stack with Flower, shared by every test that does not break it."""
    flags = ("--flower", "--flower-port", "0")
    home = tmp_path_factory.mktemp("shared") / "home"
    settings = {
        "TWINKLE_CUSTOM_LOSS_SERVER_SIDE": "true",
        "TWINKLE_LOAD_FOLDERS": json.dumps([str(opened_folder)]),
    }
    with Served(home, model=str(tiny_model), model_name="tiny", flags=flags, **settings) as it:
        yield it
