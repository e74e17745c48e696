"""A model that two of Ray's workers share, from a driver that says nothing else of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.local_ray import RayProcesses
from harness.megatron_families import make_family
from harness.megatron_two_ranks import LAYOUTS
from harness.script_run import run_script
from harness.training import make_rows
from twinkle.infra import DeviceGroup, DeviceMesh, runtime
from twinkle.model import MegatronModel, TransformersModel

TIME_LIMIT_S = 560.0
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    with RayProcesses(num_cpus=4):
        runtime.initialize(mode="ray", groups=[DeviceGroup("model", 2, "GPU")], seed=7, lazy_collect=False)
        yield
        runtime.forget()


@pytest.mark.usefixtures("on_ray")
def test_workers_that_share_tensors_train_like_one_process_and_give_each_row_once(
    families_dir: Path, tmp_path: Path
) -> None:
    folder = str(families_dir / "qwen3")
    mesh = DeviceMesh.from_sizes(tp_size=2)
    shared = MegatronModel(model_id=folder, remote_group="model", device_mesh=mesh, mixed_precision="no")
    alone = TransformersModel(model_id=folder, gradient_checkpointing=False)
    rows = make_rows(0)

    for model in (shared, alone):
        model.set_optimizer("AdamW", lr=1e-2)
    told = [(model.forward_backward(inputs=rows), model.clip_grad_and_step()) for model in (shared, alone)]

    (ours, our_norm), (theirs, their_norm) = told
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert our_norm == pytest.approx(their_norm, rel=1e-4)
    assert ours["logps"].shape == theirs["logps"].shape
    saved = shared.save("end", output_dir=str(tmp_path))
    assert (Path(str(saved)) / "model.safetensors").exists()
    assert shared.get_state_dict().keys() == alone.get_state_dict().keys()


@pytest.mark.soak
@pytest.mark.timeout(2 * TIME_LIMIT_S)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_workers_come_to_the_numbers_of_two_ranks_under_torchrun(layout: str, tmp_path: Path) -> None:
    """All weights of one model, and the adapters of another."""
    text = "from harness.megatron_two_ranks import main\nmain()\n"
    folder = str(tmp_path / "model")
    make_family(tmp_path / "model", "qwen3_moe" if layout == "experts" else "qwen3")

    fresh: dict[str, Any] = {"is_fresh": True, "time_limit_s": TIME_LIMIT_S}
    on_ray = run_script(text, tmp_path / "ray", RAY, arguments=(folder, layout, "ray"), **fresh)
    ranked = run_script(text, tmp_path / "torchrun", {}, arguments=(folder, layout, "local"), ranks=2, **fresh)

    ours, theirs = (json.loads((run.folder / "came_to.json").read_text()) for run in (on_ray, ranked))
    assert ours == theirs
    assert all(came_to["steps"] and came_to["weights"] for came_to in ours.values())
    assert len({came_to["steps"][-1][2] for came_to in ours.values()}) == 3
    for name in ("first", "second"):
        files = [run.folder / "output" / name / "adapter_model.safetensors" for run in (on_ray, ranked)]
        assert files[0].read_bytes() == files[1].read_bytes()
