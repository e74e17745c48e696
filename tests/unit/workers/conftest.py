"""A tiny model, a journal, and workers on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench
from harness.worker import MakeWorker, workers_in_turn
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.model.fused.determinism import prepare_environment
from twinkle.storage.blobs import FolderStore
from twinkle.workers.engines.transformers_engine import TransformersEngine

# MKL's mode counts only when it is chosen before the first product of the process, so before any test runs.
prepare_environment()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has read a little English."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny",
        texts=["the quick brown fox jumps over the lazy dog. " * 4],
        vocab_size=288,
        hidden_size=64,
        layers=2,
        context=256,
    )


@pytest.fixture(scope="session")
def engine(model_dir: Path) -> TransformersEngine:
    """That model on one rank, with passes so small that most work takes several."""
    return TransformersEngine.from_settings(
        Settings(model=str(model_dir), model_name="tiny", threads=1, tokens_per_pass=48)
    )


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


@pytest.fixture
def make_worker(bench: Bench, clock: HandClock, tmp_path: Path, engine: TransformersEngine) -> Iterator[MakeWorker]:
    """Workers one after the other on the module's engine."""
    with workers_in_turn(bench.stores, FolderStore(tmp_path / "objects"), clock, engine=engine) as make:
        yield make
