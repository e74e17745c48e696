"""Changes to a model, made and taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hub_caches import fill
from harness.models import make_text_model
from twinkle.core.errors import InvalidInput
from twinkle.model import TransformersModel
from twinkle.patch import Patch, apply_context, apply_patch, unpatch

DOUBLING = """
from twinkle.patch import Patch
class Doubling(Patch):
    def __call__(self, module, factor=2):
        before = module.forward
        self.replace(module, "forward", lambda x: factor * before(x))
"""


class Doubling(Patch):
    def __call__(self, module: Any, factor: int = 2) -> None:
        before = module.forward
        self.replace(module, "forward", lambda x: factor * before(x))


@pytest.fixture
def linear() -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer


def value(layer: torch.nn.Module) -> float:
    return float(layer(torch.ones(1)))


def test_a_patch_is_applied_and_taken_back(linear: torch.nn.Linear) -> None:
    patch = apply_patch(linear, Doubling, factor=3)
    again = apply_patch(linear, Doubling())
    assert value(linear) == 6
    unpatch(linear, again)
    unpatch(linear, patch)
    assert value(linear) == 1 and "forward" not in vars(linear)


def test_a_patch_lasts_as_long_as_its_block_also_when_that_fails(linear: torch.nn.Linear) -> None:
    with apply_context(linear, Doubling):
        assert value(linear) == 2
    with pytest.raises(KeyError), apply_context(linear, Doubling):
        raise KeyError
    assert value(linear) == 1


def test_a_function_is_a_patch_that_cannot_be_taken_back(linear: torch.nn.Linear) -> None:
    patch = apply_patch(linear, lambda module: torch.nn.init.zeros_(module.weight))
    assert value(linear) == 0
    with pytest.raises(InvalidInput, match="cannot be taken back"):
        unpatch(linear, patch)


def test_what_is_no_patch_is_refused(linear: torch.nn.Linear) -> None:
    for wrong in (3, "doubling", dict):
        with pytest.raises(InvalidInput, match="patch_cls"):
            apply_patch(linear, wrong)


def test_a_patch_of_a_hub_is_refused_and_allowed_as_the_operator_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linear: torch.nn.Linear
) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    fill(tmp_path / "models/org--doubling/snapshots/v1", {"__init__.py": DOUBLING})
    with pytest.raises(InvalidInput, match="runs only when the operator says so"):
        apply_patch(linear, "ms://org/doubling@v1")
    assert value(linear) == 1
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "ms://org/doubling@v1")
    apply_patch(linear, "ms://org/doubling@v1", factor=5)
    assert value(linear) == 5


def test_a_model_takes_patches(tmp_path: Path) -> None:
    model = TransformersModel(model_id=str(make_text_model(tmp_path / "model")))
    patch = model.apply_patch(lambda module: module.config.update({"patched": True}))
    assert model.model.config.patched and isinstance(patch, Patch)
