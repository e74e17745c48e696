"""Megatron's layouts on the CPU train what one transformers model trains with all rows."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from harness import megatron_training
from harness.megatron_training import EARLIER, HALF, KINDS, STEPS, make_model, scored, train

TESTS = Path(megatron_training.__file__).parents[1]
LONG = "long"
ALL = [
    pytest.param(kind, marks=pytest.mark.soak) if start.endswith(LONG) else kind
    for start, (_, kinds) in KINDS.items()
    for kind in kinds
]


@pytest.fixture(scope="module")
def trained(families_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What the ranks wrote for a kind; all kinds of one start run in one start."""
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        start, (num_ranks, kinds) = next((start, each) for start, each in KINDS.items() if kind in each[1])
        if start not in folders:
            earlier = folder(EARLIER["qwen2 dp-tp"]).parent if start == "four" else Path(os.devnull)
            folders[start] = tmp_path_factory.mktemp("ranks")
            paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "harness.forked_ranks", str(num_ranks), megatron_training.__name__]
            places = [str(families_dir), str(folders[start]), str(earlier)]
            subprocess.run(
                [*command, *places, *kinds],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=280,
            )
        return folders[start] / kind

    return folder


@pytest.mark.parametrize("kind", ALL)
def test_a_layout_trains_like_one_transformers_model(
    kind: str, families_dir: Path, trained: Callable[[str], Path]
) -> None:
    output = trained(kind)
    found = json.loads((output / "told.json").read_text())
    alone = make_model(kind, families_dir, by_megatron=False)

    logits = scored(alone, None)
    expected = train(kind, alone, 0, STEPS, None)

    [ours] = safetensors.torch.load_file(output / "logits.safetensors").values()
    torch.testing.assert_close(ours, logits[: len(ours)], atol=2e-5, rtol=1e-4)
    assert len(expected) == STEPS // 2
    for told, theirs in zip(found["told"], expected, strict=True):
        assert told["norm"] == pytest.approx(theirs["norm"], rel=2e-4)
        # LossMetric has four digits.
        assert told["loss"] == pytest.approx(theirs["loss"], abs=2e-4)
        assert told["rate"] == theirs["rate"]
    assert found["every_rank_is_told"]
    assert found["resumed_is_same"]
    state = alone.get_state_dict()
    saved = safetensors.torch.load_file(output / "end" / "model.safetensors")
    assert saved.keys() == state.keys() - ({"lm_head.weight"} if kind.startswith("tied") else set())
    for name, value in saved.items():
        # Adam divides by the root of a second moment near 0: rounding shows in weights whose gradient is almost none.
        torch.testing.assert_close(value, state[name], atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("kind", ["qwen3 tp", "qwen2 pp", "qwen3 dp"])
def test_transformers_goes_on_where_megatron_stopped(
    kind: str, families_dir: Path, trained: Callable[[str], Path]
) -> None:
    output = trained(kind)
    alone = make_model(kind, families_dir, by_megatron=False)
    alone.resume_from_checkpoint(output / "half")

    [step] = train(kind, alone, HALF, STEPS, None)

    expected = json.loads((output / "told.json").read_text())["told"][-1]
    assert step["norm"] == pytest.approx(expected["norm"], rel=2e-4)


@pytest.mark.parametrize("kind", EARLIER)
def test_a_layout_goes_on_where_another_stopped(kind: str, trained: Callable[[str], Path]) -> None:
    [step] = json.loads((trained(kind) / "told.json").read_text())["went_on"]

    expected = json.loads((trained(EARLIER[kind]) / "told.json").read_text())["told"][-1]
    assert step["norm"] == pytest.approx(expected["norm"], rel=2e-4)


def test_what_megatron_saves_is_a_model_of_transformers(trained: Callable[[str], Path]) -> None:
    folder = trained("tied tp grpo") / "end"

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)

    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
