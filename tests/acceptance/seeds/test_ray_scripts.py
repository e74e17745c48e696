"""The documents' scripts that run on groups of devices with Ray; the sizes of group and mesh alone are set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.hub_world import HubWorld
from harness.opened_checkpoint import assert_same_in_peft
from harness.script_run import Run, run_script
from harness.seeds import Script

pytest.importorskip("ray", reason="the extra twinkle-queue[ray] is not installed")
# Each starts Ray and ranks that load transformers; two ranks against torchrun are in tests/unit/infra/ray.
pytestmark = pytest.mark.soak

SUPERVISED = {"000:637": "qwen3_5", "001:91": "qwen2", "002:882": "qwen3", "003:123": "qwen2"}
"""The same training in four documents, and the class of the model that each names."""
TIME_LIMIT_S = 560


def run(
    script: Script, world: HubWorld, folder: Path, *, ranks: int, is_local: bool = False, rows: int | None = None
) -> Run:
    """Run it with a group of so many devices; under torchrun where only the mode is another."""
    text = script.text
    if ranks != 8:
        text, count = re.subn(
            r"ranks=8(.*)\n(.*)from_sizes\(.*?\)", rf"ranks={ranks}\1\n\2from_sizes(fsdp_size={ranks})", text
        )
        assert count == 1, "the lines that say the sizes"
    if rows is not None:
        text = text.replace("range(1000)", f"range({rows})")
    if is_local:
        text = text.replace("mode='ray'", "mode='local'")
    local_ranks = ranks if is_local else 0
    return run_script(text, folder, world.environment, ranks=local_ranks, is_fresh=True, time_limit_s=TIME_LIMIT_S)


def assert_it_learned(done: Run, world: HubWorld, model_class: str) -> None:
    progress = done.progress
    assert progress[-1].loss < progress[0].loss
    assert_same_in_peft(world.model(model_class), done.folder / "output" / "last-checkpoint")


def test_supervised_training_on_a_group_learns_tells_and_saves(
    scripts: list[Script], world: HubWorld, tmp_path: Path
) -> None:
    """Metrics and the path of the checkpoint are values, whatever else a call gives back."""
    script = next(script for script in scripts if script.name == "002:882")

    done = run(script, world, tmp_path, ranks=2, rows=21 * 8)

    assert [told.step for told in done.progress] == [0, 20] and {told.steps for told in done.progress} == {21}
    assert_it_learned(done, world, "qwen3")


@pytest.mark.parametrize("name", SUPERVISED)
def test_the_same_file_gives_the_same_numbers_under_torchrun(
    scripts: list[Script], world: HubWorld, tmp_path: Path, name: str
) -> None:
    script = next(script for script in scripts if script.name == name)

    on_ray = run(script, world, tmp_path / "ray", ranks=2, rows=41 * 8)
    local = run(script, world, tmp_path / "local", ranks=2, rows=41 * 8, is_local=True)

    # Under torchrun every rank prints.
    assert {(told.step, told.loss) for told in on_ray.progress} == {(told.step, told.loss) for told in local.progress}
    weights = [each.folder / "output" / "last-checkpoint" / "adapter_model.safetensors" for each in (on_ray, local)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("name", SUPERVISED)
def test_eight_ranks_share_what_processors_there_are(
    scripts: list[Script], world: HubWorld, tmp_path: Path, name: str
) -> None:
    """Word for word: eight devices that this machine has not, in a mesh of fsdp 4 and dp 2."""
    script = next(script for script in scripts if script.name == name)

    done = run(script, world, tmp_path, ranks=8)

    assert "ray.groups.on_cpu" in done.output
    assert_it_learned(done, world, SUPERVISED[name])
