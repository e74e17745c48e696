"""Trainings by Megatron on two workers of a group, or on two ranks under torchrun: ``MODEL LAYOUT MODE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft

import twinkle
from harness.training import make_rows
from harness.watched_script import hash_of
from twinkle.infra import DeviceGroup, DeviceMesh
from twinkle.infra.runtime import serves_all_ranks
from twinkle.model import MegatronModel, MultiLoraMegatronModel

SEED = 7
STEPS = 3
LAYOUTS: dict[str, dict[str, int]] = {
    "tensors": {"tp_size": 2},
    "layers": {"pp_size": 2},
    "sequences": {"cp_size": 2},
    "experts": {"dp_size": 2, "ep_size": 2},
}
"""By what two ranks share."""


def trained(model: Any, mesh: DeviceMesh, *, adapter: str, output_dir: str) -> dict[str, Any]:
    """Some steps; losses, norms, a hash of each trained tensor, and what was saved."""
    more = {"adapter_name": adapter} if adapter else {}
    model.set_optimizer("AdamW", lr=1e-2, **more)
    steps = []
    for step in range(STEPS):
        rows = make_rows(step)
        told = model.forward_backward(inputs=rows if serves_all_ranks() else mesh.slice_data(rows), **more)
        norm = model.clip_grad_and_step(max_grad_norm=0.5, **more)
        loss = model.calculate_metric(is_training=True, **more)["loss"]
        # Of data ranks the driver has the outputs of all, and each rank its own.
        logps = hash_of(told["logps"]) if mesh.data_world_size == 1 else ""
        steps.append([loss, logps, float(norm)])
    weights = {name: hash_of(tensor) for name, tensor in model.get_state_dict(**more).items()}
    saved = model.save(adapter or "whole", output_dir=output_dir, **more)
    return {"steps": steps, "weights": weights, "saved": Path(str(saved)).name}


def train(model_dir: str, layout: str, output_dir: str) -> dict[str, Any]:
    """All weights, then two adapters beside each other on frozen ones."""
    mesh = DeviceMesh.from_sizes(**LAYOUTS[layout])
    placed: Any = {"device_mesh": mesh, "remote_group": "model", "mixed_precision": "no"}
    whole = trained(MegatronModel(model_id=model_dir, **placed), mesh, adapter="", output_dir=output_dir)
    shared: Any = MultiLoraMegatronModel(model_id=model_dir, **placed)
    for rank, name in enumerate(("first", "second"), start=3):
        shared.add_adapter_to_model(name, peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear"))
    return {"whole": whole} | {
        name: trained(shared, mesh, adapter=name, output_dir=output_dir) for name in ("first", "second")
    }


def main() -> None:
    """On Ray the driver, under torchrun each rank."""
    model_dir, layout, mode = sys.argv[1:]
    group = DeviceGroup("model", 2, "GPU")
    twinkle.initialize(mode=mode, groups=[group], seed=SEED, lazy_collect=False)
    came_to = train(model_dir, layout, "output")
    if twinkle.is_master():
        Path("came_to.json").write_text(json.dumps(came_to))


if __name__ == "__main__":
    main()
