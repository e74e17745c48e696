"""Our own scripts run as they are, with a tiny model and few rows, and hold what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from harness.hub_world import HubWorld
from harness.opened_checkpoint import assert_same_in_peft
from harness.script_run import Run, assert_ranks_hold_the_same, run_script

COOKBOOK = Path(__file__).resolve().parents[3] / "cookbook"
FEW = {"NUM_ROWS": "64", "LEARNING_RATE": "1e-2", "LOG_EVERY": "3"}
RunCookbook = Callable[..., Run]


@pytest.fixture
def run_cookbook(world: HubWorld, tmp_path: Path) -> RunCookbook:
    """Runs a script of the cookbook in this test's folder."""

    def run(name: str, *, ranks: int = 0, folder: str = "run", **settings: str) -> Run:
        text = (COOKBOOK / name).read_text()
        return run_script(text, tmp_path / folder, {**world.environment, **FEW, **settings}, ranks=ranks)

    return run


def test_the_readme_names_every_script(world: HubWorld) -> None:
    shown = set(re.findall(r"\]\(([\w/]+\.py)\)", (COOKBOOK / "README.md").read_text()))

    assert shown == {path.relative_to(COOKBOOK).as_posix() for path in COOKBOOK.rglob("*.py")}


def test_a_model_learns_its_name_and_goes_on_to_the_bit_after_a_stop(
    run_cookbook: RunCookbook, world: HubWorld, tmp_path: Path
) -> None:
    whole = run_cookbook("transformers/self_cognition.py", SAVE_EVERY="4")
    checkpoints = whole.folder / "output" / "self_cognition"
    resumed = run_cookbook(
        "transformers/self_cognition.py", folder="resumed", RESUME_FROM=str(checkpoints / "checkpoint-4")
    )

    assert "rows, none wrong" in whole.output
    assert loss_at_the_end(whole) < 0.8 * whole.progress[0].loss
    assert_same_in_peft(world.model("qwen3_5"), checkpoints / "last-checkpoint")
    assert adapter_of(checkpoints / "last-checkpoint") == adapter_of(
        resumed.folder / "output" / "self_cognition" / "last-checkpoint"
    )


def test_plain_text_is_packed_and_all_parameters_learn_it(
    run_cookbook: RunCookbook, world: HubWorld, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"one two three {number % 7} four five"}) + "\n" for number in range(400))
    )

    run = run_cookbook(
        "transformers/packed_pre_training.py", DATASET_ID=str(texts), MAX_LENGTH="128", EPOCHS="2", BATCH_SIZE="8"
    )

    assert run.progress[-1].loss < 0.8 * run.progress[0].loss
    assert (run.folder / "output" / "packed_pre_training" / "last-checkpoint" / "model.safetensors").exists()


def test_two_ranks_keep_the_best_checkpoint_and_go_on_from_it_to_the_bit(run_cookbook: RunCookbook) -> None:
    whole = run_cookbook("transformers/fsdp2.py", ranks=2, EVALUATE_EVERY="3")
    checkpoints = whole.folder / "output" / "fsdp2"
    resumed = run_cookbook(
        "transformers/fsdp2.py",
        ranks=2,
        folder="resumed",
        EVALUATE_EVERY="100",
        RESUME_FROM=str(checkpoints / "best-checkpoint"),
    )

    # Each rank has read its share alone, also of a file that names the layers of a model for pictures.
    assert "model.loaded_whole" not in whole.output
    assert_ranks_hold_the_same(whole, 2)
    evaluated = [float(loss) for loss in re.findall(r"Evaluation at step \d+: ([\d.]+)", whole.output)]
    assert len(evaluated) == 2 and evaluated[-1] < evaluated[0] < whole.progress[0].loss
    assert adapter_of(checkpoints / "last-checkpoint") == adapter_of(
        resumed.folder / "output" / "fsdp2" / "last-checkpoint"
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ep_fsdp_qwen3_moe", {"ACCUMULATION": "1", "LEARNING_RATE": "1e-3"}),
        # What these lay out, unit tests of models hold to the numbers of one rank as well.
        pytest.param("fsdp2_moe", {}, marks=pytest.mark.soak),
        pytest.param("sp_fsdp_dense", {"MAX_LENGTH": "512"}, marks=pytest.mark.soak),
    ],
)
def test_two_ranks_train_one_model_however_it_is_shared_out(
    run_cookbook: RunCookbook, name: str, settings: dict[str, str]
) -> None:
    alone = run_cookbook(f"transformers/{name}.py", folder="alone", **settings)
    shared = run_cookbook(f"transformers/{name}.py", ranks=2, folder="shared", **settings)

    assert_ranks_hold_the_same(shared, 2)
    assert shared.progress[-1].loss < shared.progress[0].loss
    assert shared.progress[0].loss == pytest.approx(alone.progress[0].loss, rel=1e-3)
    assert (shared.folder / "output" / name / "last-checkpoint").is_dir()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "model", "settings"),
    [
        ("tp", "qwen3_5", {}),
        ("tp", "qwen3_5", {"TP_SIZE": "1", "CP_SIZE": "2", "PP_SIZE": "1"}),
        ("tp_moe", "qwen3_moe", {"TP_SIZE": "1", "PP_SIZE": "1"}),
    ],
)
def test_megatron_trains_on_two_ranks_what_peft_opens(
    run_cookbook: RunCookbook, world: HubWorld, name: str, model: str, settings: dict[str, str]
) -> None:
    alone = run_cookbook(f"megatron/{name}.py", folder="alone")
    shared = run_cookbook(f"megatron/{name}.py", ranks=2, folder="shared", **settings)

    assert shared.progress[-1].loss < shared.progress[0].loss
    assert shared.progress[0].loss == pytest.approx(alone.progress[0].loss, rel=1e-3)
    assert_same_in_peft(world.model(model), shared.folder / "output" / f"megatron_{name}" / "last-checkpoint")


def loss_at_the_end(run: Run) -> float:
    found = re.search(r"Loss at the end: ([\d.]+)", run.output)
    assert found, run.output[-2000:]
    return float(found.group(1))


def adapter_of(checkpoint: Path) -> dict[str, list[float]]:
    """The bits of an adapter."""
    tensors: dict[str, torch.Tensor] = safetensors.torch.load_file(checkpoint / "adapter_model.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
