"""Several ranks on the CPU, each with its rows, train what one process trains with all of them."""

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

from harness import parallel_training
from harness.families import FAMILIES, stir
from harness.parallel_training import (
    EARLIER,
    EIGHT_RANKS,
    FOUR_RANKS,
    HALF,
    PLAIN,
    STEPS,
    TWO_RANKS,
    make_model,
    model_of,
    train,
)
from twinkle.core.errors import ConfigError
from twinkle.hub.tiny import make_tiny_model
from twinkle.infra import DeviceMesh
from twinkle.model import TransformersModel

TEXTS = ["the quick brown fox jumps over the lazy dog, and the dog looks at the fox. " * 8]
KINDS = {2: TWO_RANKS, 4: FOUR_RANKS, 8: EIGHT_RANKS}
TESTS = Path(parallel_training.__file__).parents[1]


@pytest.fixture(scope="module")
def models_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family whose layers ranks share in another way."""
    folder = tmp_path_factory.mktemp("families")
    (folder / PLAIN).symlink_to(model_dir)
    sizes = {"texts": TEXTS, "vocab_size": 288, "hidden_size": 64, "layers": 2, "context": 256}
    make_tiny_model(folder / "hybrid", family="qwen3_5_text", **sizes)
    make_tiny_model(folder / "moe", family="qwen3_moe", **sizes)
    make_tiny_model(folder / "missed", family="qwen3_moe", **sizes)
    _let_no_token_reach_the_last_experts(folder / "missed")
    for name, family in (("capped", "gemma2"), ("sinks", "gpt-oss"), ("deepseek", "deepseek-v4")):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
        stir(model)
        model.save_pretrained(folder / name)
    return folder


def _let_no_token_reach_the_last_experts(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        # Of a row and its negative one has a positive product, so two of these four are before all zeros.
        rows = tensors[name]
        tensors[name] = torch.cat([rows[:2], -rows[:2], torch.zeros_like(rows[4:])])
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def trained(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What the ranks wrote for a kind; all kinds of one number of ranks run in one start."""
    folders: dict[int, Path] = {}

    def folder(kind: str) -> Path:
        num_ranks, kinds = next((number, kinds) for number, kinds in KINDS.items() if kind in kinds)
        if num_ranks not in folders:
            earlier = folder(TWO_RANKS[0]).parent if num_ranks == 4 else Path(os.devnull)
            folders[num_ranks] = tmp_path_factory.mktemp("ranks")
            paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "harness.forked_ranks", str(num_ranks), parallel_training.__name__]
            subprocess.run(
                [*command, str(models_dir), str(folders[num_ranks]), str(earlier), *kinds],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=400,
            )
        return folders[num_ranks] / kind

    return folder


@pytest.mark.parametrize(
    "kind", [*TWO_RANKS, *FOUR_RANKS, *(pytest.param(kind, marks=pytest.mark.soak) for kind in EIGHT_RANKS)]
)
def test_ranks_with_their_rows_train_like_one_with_all(
    kind: str, models_dir: Path, trained: Callable[[str], Path]
) -> None:
    output = trained(kind)
    found = json.loads((output / "told.json").read_text())
    alone = make_model(kind, models_dir, None)
    alone.load(output / "start")
    expected = train(kind, alone, 0, STEPS, None)
    assert len(expected) == STEPS // 2
    # Under shards every product is made in float16; alone those that need more have more.
    is_coarse = kind.startswith("fp16")
    for ours, theirs in zip(found["told"], expected, strict=True):
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=2e-2 if is_coarse else 1e-4)
        # LossMetric has four digits.
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-2 if is_coarse else 2e-4)
        assert ours["rate"] == theirs["rate"]
    assert found["resumed_is_same"]
    assert found["ranks_are_same"]
    if is_coarse:
        return
    state = alone.get_state_dict()
    for name, value in safetensors.torch.load_file(output / "end.safetensors").items():
        # Adam divides by the root of a second moment near 0: rounding shows in weights whose gradient is almost none.
        torch.testing.assert_close(value, state[name], atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("kind", [kind for kind in TWO_RANKS if kind.startswith("bins")])
def test_rows_of_a_packed_data_set_train_like_the_rows_alone(
    kind: str, models_dir: Path, trained: Callable[[str], Path]
) -> None:
    told = json.loads((trained(kind) / "told.json").read_text())["told"]
    alone = make_model(kind, models_dir, None)
    alone.load(trained(kind) / "start")

    expected = train(kind.replace("bins", "full"), alone, 0, STEPS, None)

    assert [step["norm"] for step in told] == pytest.approx([step["norm"] for step in expected], rel=1e-4)
    assert [step["loss"] for step in told] == pytest.approx([step["loss"] for step in expected], abs=2e-4)


@pytest.mark.parametrize("kind", ["full fsdp", "lora fsdp", "full fsdp moe", "fp16 fsdp"])
def test_a_rank_reads_its_share_of_the_weights_alone(
    kind: str, models_dir: Path, trained: Callable[[str], Path]
) -> None:
    most = json.loads((trained(kind) / "told.json").read_text())["most_bytes_read"]

    whole = sum(path.stat().st_size for path in (models_dir / model_of(kind)).glob("*.safetensors"))
    # Halves of what has an odd number of rows.
    assert 0 < most < 0.55 * whole


@pytest.mark.parametrize("kind", ["full dp", "lora fsdp", "full ulysses hybrid", "full fsdp-ep moe"])
def test_one_process_goes_on_where_two_ranks_stopped(
    kind: str, models_dir: Path, trained: Callable[[str], Path]
) -> None:
    output = trained(kind)
    alone = make_model(kind, models_dir, None)
    alone.resume_from_checkpoint(output / "half")

    [step] = train(kind, alone, HALF, STEPS, None)

    expected = json.loads((output / "told.json").read_text())["told"][-1]
    assert step["norm"] == pytest.approx(expected["norm"], rel=1e-4)


@pytest.mark.parametrize("kind", EARLIER)
def test_four_ranks_go_on_where_two_stopped(kind: str, trained: Callable[[str], Path]) -> None:
    [step] = json.loads((trained(kind) / "told.json").read_text())["went_on"]

    expected = json.loads((trained(EARLIER[kind]) / "told.json").read_text())["told"][-1]
    assert step["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert step["rate"] == expected["rate"]


def test_other_kinds_of_parallelism_and_lone_processes_are_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp_size: is 2.*use MegatronModel"):
        TransformersModel(model_id=str(model_dir), device_mesh=DeviceMesh.from_sizes(tp_size=2, device_type="cpu"))
    with pytest.raises(ConfigError, match=r"twinkle\.initialize"):
        TransformersModel(model_id=str(model_dir), device_mesh=DeviceMesh.from_sizes(dp_size=2, device_type="cpu"))
