"""The documents' scripts run word for word, and what they promise comes true."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.hub_world import HubWorld
from harness.opened_checkpoint import assert_same_in_peft
from harness.script_run import Run, assert_ranks_hold_the_same, run_script
from harness.seeds import Script

RunSeed = Callable[..., Run]
MAX_LENGTH = 512
"""That the packing scripts ask for."""
TORCHRUN = {"000:106": "Qwen3.5-4B", "002:141": "Qwen3-4B"}
ALONE = {"000:60": "Qwen3.5-4B", "002:78": "Qwen3-4B"}
PACKING = ("000:32", "002:38")
ALL_RANKS = 8


@pytest.fixture(scope="session")
def run_seed(scripts: list[Script], world: HubWorld, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs a script of the documents once; asked for again, the same run is meant."""
    named = {script.name: script for script in scripts}
    done: dict[tuple[str, int], Run] = {}

    def run(name: str, *, ranks: int = 0, sizes: str = "") -> Run:
        # One by an interpreter that has imported nothing, as a reader has it; ranks by torchrun, as the document says.
        is_fresh = name == PACKING[0]
        if (name, ranks) not in done:
            text = named[name].text
            if sizes:
                text, count = re.subn(r"from_sizes\(.*?\)", f"from_sizes({sizes})", text)
                assert count == 1, "the line that says the sizes"
            folder = tmp_path_factory.mktemp(name.replace(":", "-"))
            done[name, ranks] = run_script(
                text, folder, world.environment, ranks=ranks, is_fresh=is_fresh, time_limit_s=280
            )
        return done[name, ranks]

    return run


@pytest.mark.parametrize("name", PACKING)
def test_packed_rows_are_as_long_as_promised_and_begin_anew_with_each_sample(run_seed: RunSeed, name: str) -> None:
    rows = _printed_batch(run_seed(name).output)

    assert 1 <= len(rows) <= 8
    assert all(len(row["input_ids"]) <= MAX_LENGTH for row in rows)
    # Nothing more would have fitted but what is shorter than what is free.
    assert max(len(row["input_ids"]) for row in rows) > MAX_LENGTH * 0.7
    for row in rows:
        positions = np.array(row["position_ids"]).reshape(-1, len(row["input_ids"]))[0]
        starts = np.flatnonzero(positions == 0)
        assert starts[0] == 0 and len(starts) > 1
        assert (np.diff(positions)[np.diff(positions) != 1] < 0).all()
        labels = np.array(row["labels"])
        assert (labels != -100).any() and len(labels) == len(positions)
        # The last of each sample has no token after it to learn.
        assert (labels[np.append(starts[1:], len(labels)) - 1] == -100).all()


@pytest.mark.parametrize("name", ALONE)
def test_the_loss_falls_and_is_told_every_twenty_steps(run_seed: RunSeed, name: str) -> None:
    progress = run_seed(name).progress

    assert [told.step for told in progress] == list(range(0, 125, 20))
    assert {told.steps for told in progress} == {125}
    assert progress[-1].loss < progress[1].loss < progress[0].loss


@pytest.mark.parametrize("name", ALONE)
def test_the_checkpoint_opens_in_plain_peft_with_the_logits_it_was_trained_to(
    run_seed: RunSeed, world: HubWorld, name: str
) -> None:
    checkpoint = run_seed(name).folder / "output" / "last-checkpoint"
    base = world.model("qwen3_5" if ALONE[name] == "Qwen3.5-4B" else "qwen3")

    assert_same_in_peft(base, checkpoint)


# A hybrid's layers on two ranks are those of unit/model/test_parallel_training.py; by this script they train in soak.
@pytest.mark.parametrize("name", [pytest.param("000:106", marks=pytest.mark.soak), "002:141"])
def test_under_torchrun_two_ranks_train_one_model(run_seed: RunSeed, name: str) -> None:
    """The sizes of the mesh are those of eight ranks, which soak runs; here two stand in their place."""
    run = run_seed(name, ranks=2, sizes="fsdp_size=2, dp_size=1")

    assert_ranks_hold_the_same(run, 2)
    assert run.progress[-1].loss < run.progress[0].loss
    assert (run.folder / "output" / "last-checkpoint" / "adapter_model.safetensors").exists()


def test_two_ranks_start_from_the_loss_of_one(run_seed: RunSeed) -> None:
    """An adapter computes nothing before its first step: whatever was drawn for it, the first batch has one loss."""
    alone, ranked = run_seed("002:78"), run_seed("002:141", ranks=2, sizes="fsdp_size=2, dp_size=1")

    assert ranked.progress[0].loss == pytest.approx(alone.progress[0].loss, rel=1e-4)
    assert ranked.progress[-1].loss == pytest.approx(alone.progress[-1].loss, rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("name", TORCHRUN)
def test_under_torchrun_the_eight_ranks_of_the_documents_train_one_model(run_seed: RunSeed, name: str) -> None:
    run = run_seed(name, ranks=ALL_RANKS)

    assert_ranks_hold_the_same(run, ALL_RANKS)
    assert run.progress[-1].loss < run.progress[0].loss


def test_fewer_ranks_than_the_mesh_has_are_refused_with_the_command_that_fits(
    scripts: list[Script], world: HubWorld, tmp_path: Path
) -> None:
    text = next(script.text for script in scripts if script.name == "000:106")

    with pytest.raises(AssertionError, match=f"nproc_per_node={ALL_RANKS}"):
        run_script(text, tmp_path, world.environment)


def _printed_batch(output: str) -> list[dict[str, list[int]]]:
    """The one batch that the packing scripts print."""
    start = output.index("[{")
    text = output[start : output.index("}]", start) + 2]
    batch = ast.literal_eval(text)
    assert isinstance(batch, list)
    return batch
