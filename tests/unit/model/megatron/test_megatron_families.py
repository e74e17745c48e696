"""Mixtures of experts, latent attention, delta nets and adapters by Megatron train as they do by transformers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from harness import megatron_families
from harness.megatron_families import (
    FOUR_RANKS,
    OTHER_AXES,
    SIZES,
    SOAKED,
    STEPS,
    TWO_RANKS,
    make_adapter,
    make_family,
    make_model,
    scored,
    train,
)
from twinkle.model import TransformersModel

TESTS = Path(megatron_families.__file__).parents[1]
ADAPTER = "adapter_model.safetensors"
SOAK = (*FOUR_RANKS, *SOAKED, *OTHER_AXES)


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family, and an adapter for those that have one."""
    folder = tmp_path_factory.mktemp("families")
    adapted = {kind.split()[0] for kind in (*TWO_RANKS, *SOAK) if kind.endswith("lora")}
    for family in SIZES:
        make_family(folder / family, family)
        if family in adapted:
            make_adapter(folder / f"{family}-adapter", folder, family)
    return folder


@pytest.fixture(scope="module")
def trained(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What the ranks wrote for a kind; all of a group run in one start."""
    folders: dict[tuple[str, ...], Path] = {}

    def folder(kind: str) -> Path:
        kinds = next(group for group in (TWO_RANKS, SOAKED, OTHER_AXES, FOUR_RANKS) if kind in group)
        if kinds not in folders:
            folders[kinds] = tmp_path_factory.mktemp("ranks")
            paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
            num_ranks = "4" if kinds is FOUR_RANKS else "2"
            command = [sys.executable, "-m", "harness.forked_ranks", num_ranks, megatron_families.__name__]
            subprocess.run(
                [*command, str(models_dir), str(folders[kinds]), *kinds],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=560,
            )
        return folders[kinds] / kind

    return folder


@pytest.mark.parametrize("kind", [*TWO_RANKS, *(pytest.param(kind, marks=pytest.mark.soak) for kind in SOAK)])
def test_ranks_train_what_one_transformers_model_trains(
    kind: str, models_dir: Path, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    output = trained(kind)
    found = json.loads((output / "told.json").read_text())
    alone = make_model(kind, models_dir, by_megatron=False)

    logits = scored(alone, None)
    expected = train(alone, 0, STEPS, None)

    ours = safetensors.torch.load_file(output / "logits.safetensors")
    close(ours["logits"], logits[: len(ours["logits"])], 1e-4)
    for told, theirs in zip(found["told"], expected, strict=True):
        assert told["norm"] == pytest.approx(theirs["norm"], rel=1e-3)
        # LossMetric has four digits.
        assert told["loss"] == pytest.approx(theirs["loss"], abs=2e-4)
    assert found["resumed_is_same"]
    if kind.endswith("whole"):
        alone.save("end", output_dir=tmp_path)
        assert_same_files(output / "end", tmp_path / "end", "model.safetensors")


@pytest.mark.parametrize("kind", [kind for kind in TWO_RANKS if kind.endswith("lora")])
def test_an_adapter_of_megatrons_is_peft_s_and_can_be_left_out_or_merged(
    kind: str, models_dir: Path, trained: Callable[[str], Path]
) -> None:
    output = trained(kind)
    plain = TransformersModel(model_id=str(models_dir / kind.split()[0]))
    base = scored(plain, None)
    plain.add_adapter_to_model("default", str(output / "end"))
    alone = make_model(kind, models_dir, by_megatron=False)
    train(alone, 0, STEPS, None)

    ours = safetensors.torch.load_file(output / "logits.safetensors")
    merged = safetensors.torch.load_file(output / "merged.safetensors")

    close(ours["base"], base[: len(ours["base"])], 1e-4)
    close(scored(plain, None), scored(alone, None), 2e-3)
    theirs: dict[str, Any] = dict(plain.send_weights(merge=True))
    shared = merged.keys() & theirs.keys()
    assert len(shared) > 10
    for name in shared:
        close(merged[name], theirs[name], 1e-5)


def assert_same_files(found: Path, expected: Path, name: str) -> None:
    ours, theirs = (safetensors.torch.load_file(folder / name) for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        close(value, theirs[key], 2e-4)


def close(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """As near as float32 sums in another order are, by the largest entry."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= share * expected.abs().max()
