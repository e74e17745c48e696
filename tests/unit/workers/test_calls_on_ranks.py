"""Two ranks train by calls as one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.called_engine import Called, twinkle_config
from harness.training import make_rows
from twinkle.core.errors import InvalidInput
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.workers.process import build_engine
from twinkle.workers.ranks.engine import RankedEngine
from twinkle.workers.transformers_engine import TransformersEngine

ROWS = [{name: row[name] for name in ("input_ids", "labels")} for row in make_rows(0, vocab_size=250)]
TOLERANCE = 2e-5
"""Relative to the largest value: sums over rows are made in another order."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, texts=["a tiny text"] * 4, hidden_size=64, layers=2, vocab_size=300)


def _settings(model_dir: Path, **more: Any) -> Settings:
    return Settings(model=str(model_dir), model_name="tiny", threads=1, tokens_per_pass=48, **more)


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[RankedEngine]:
    engine = build_engine(_settings(model_dir, ranks=2, rank_timeout_s=300.0))
    assert isinstance(engine, RankedEngine)
    yield engine
    engine.close()


def _train(called: Called) -> list[float]:
    called("set_loss", loss_cls="GRPOLoss")
    called("set_optimizer", optimizer_cls="SGD", lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        called("forward", inputs=ROWS, advantages=[0.5, -1.0, 2.0, 0.25])
        losses.append(called("calculate_loss"))
        called("backward")
        called("clip_grad_and_step")
    called("set_loss", loss_cls="InfonceLoss")
    pairs = [{**row, "labels": [(index + 1) % 2]} for index, row in enumerate(ROWS)]
    embedded = called("forward_backward", inputs=pairs, task="embedding")
    called("clip_grad_and_step")
    return [*losses, embedded["loss"]]


def test_two_ranks_train_by_calls_as_one_does(model_dir: Path, two: RankedEngine) -> None:
    one = TransformersEngine.from_settings(_settings(model_dir))
    alone, together, parked = Called(one), Called(two), Called(two, parks=True)

    assert _train(together) == pytest.approx(_train(alone), rel=1e-4)

    assert _train(parked) == pytest.approx(_train(Called(two)), rel=0)
    there = one.restore(two.snapshot(together.state))
    wanted, found = alone.params, there.adapter.params  # type: ignore[union-attr]
    assert torch.allclose(found, wanted, atol=TOLERANCE * float(wanted.abs().max()), rtol=0)


def test_what_is_refused_on_two_ranks_leaves_them_in_step(two: RankedEngine) -> None:
    called = Called(two, twinkle_config(seed=3))
    with pytest.raises(InvalidInput, match="GRPOLoss"):
        called("set_loss", loss_cls="GRPOLos")
    with pytest.raises(InvalidInput, match="inputs"):
        called("forward_backward", inputs=[])
    two.note_failure(called.state)
    called("forward_backward", inputs=ROWS)

    assert two.has_gradients(called.state)
    two.snapshot(called.state)
