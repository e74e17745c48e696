"""Fixtures of the acceptance tests: whole services, real models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.served import Served
from twinkle.hub.tiny import make_tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights, and a tokenizer trained on the shipped text."""
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.jsonl"))]
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "some" / "tiny", texts=texts, hidden_size=32, layers=2, vocab_size=400
    )


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    """One embedded stack with Flower, shared by every test that does not break it."""
    flags = ("--flower", "--flower-port", "0")
    with Served(
        tmp_path_factory.mktemp("shared") / "home", model=str(tiny_model), model_name="tiny", flags=flags
    ) as it:
        yield it
