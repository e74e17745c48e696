"""A model whose tensors two of Ray's workers share, from a driver that says nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.local_ray import RayProcesses
from harness.training import make_rows
from twinkle.infra import DeviceGroup, DeviceMesh, runtime
from twinkle.model import MegatronModel, TransformersModel


@pytest.fixture(scope="module", autouse=True)
def on_ray() -> Iterator[None]:
    with RayProcesses(num_cpus=4):
        runtime.initialize(mode="ray", groups=[DeviceGroup("model", 2, "GPU")], seed=7, lazy_collect=False)
        yield
        runtime.forget()


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
