"""Trainings by Megatron on two workers of a group, or on two ranks under torchrun: ``MODEL tp_size|pp_size MODE``."""

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
from twinkle.model import MegatronModel, MultiLoraMegatronModel

SEED = 7
STEPS = 3


def trained(model: Any, *, adapter: str, output_dir: str) -> dict[str, Any]:
    """Some steps; losses, norms, a hash of each trained tensor, and what was saved."""
    more = {"adapter_name": adapter} if adapter else {}
    model.set_optimizer("AdamW", lr=1e-2, **more)
    steps = []
    for step in range(STEPS):
        told = model.forward_backward(inputs=make_rows(step), **more)
        norm = model.clip_grad_and_step(max_grad_norm=0.5, **more)
        steps.append([float(told["loss"]), hash_of(told["logps"]), float(norm)])
    weights = {name: hash_of(tensor) for name, tensor in model.get_state_dict(**more).items()}
    saved = model.save(adapter or "whole", output_dir=output_dir, **more)
    return {"steps": steps, "weights": weights, "saved": Path(str(saved)).name}


def train(model_dir: str, axis: str, output_dir: str) -> dict[str, Any]:
    """All weights, then two adapters beside each other on frozen ones."""
    placed = {"device_mesh": DeviceMesh.from_sizes(**{axis: 2}), "remote_group": "model", "mixed_precision": "no"}
    whole = trained(MegatronModel(model_id=model_dir, **placed), adapter="", output_dir=output_dir)
    shared: Any = MultiLoraMegatronModel(model_id=model_dir, **placed)
    for rank, name in enumerate(("first", "second"), start=3):
        shared.add_adapter_to_model(name, peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear"))
    return {"whole": whole} | {
        name: trained(shared, adapter=name, output_dir=output_dir) for name in ("first", "second")
    }


def main() -> None:
    """On Ray the driver, under torchrun each rank."""
    model_dir, axis, mode = sys.argv[1:]
    group = DeviceGroup("model", 2, "GPU")
    twinkle.initialize(mode=mode, groups=[group], seed=SEED, lazy_collect=False)
    came_to = train(model_dir, axis, "output")
    if twinkle.is_master():
        Path("came_to.json").write_text(json.dumps(came_to))


if __name__ == "__main__":
    main()
