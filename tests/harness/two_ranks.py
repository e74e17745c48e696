"""Trainings that a script runs on two workers of a group, or on two ranks under torchrun; what they came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft

import twinkle
from harness.watched_script import hash_of
from twinkle.dataloader import DataLoader
from twinkle.infra import DeviceGroup, DeviceMesh
from twinkle.model import TransformersModel

SEED = 7
GROUP = DeviceGroup("model", 2, "GPU")
ROWS = [{"input_ids": [1 + n, 2, 3 + n, 4][: 3 + n % 2], "labels": [2, 3 + n, 4, -100][: 3 + n % 2]} for n in range(12)]
LAYOUTS: dict[str, dict[str, int]] = {
    "shares": {"fsdp_size": 2},
    "sequences": {"fsdp_size": 2, "ulysses_size": 2},
    "experts": {"fsdp_size": 2, "ep_size": 2},
}
"""By what two ranks share; the model's folder has the same name."""


def train(models_dir: Path, output_dir: Path) -> dict[str, Any]:
    """Each layout's training."""
    return {what: _trained(str(models_dir / what), what, str(output_dir / what)) for what in LAYOUTS}


def _trained(model_dir: str, what: str, output_dir: str) -> dict[str, Any]:
    """Three steps; losses, norms and a hash of each trained tensor."""
    mesh = DeviceMesh.from_sizes(**LAYOUTS[what])
    model = TransformersModel(model_dir, device_mesh=mesh, remote_group="model", gradient_checkpointing=False)
    model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=3)
    steps = []
    for batch in DataLoader(ROWS, batch_size=4, shuffle=True, seed=SEED, device_mesh=mesh):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        metric = model.calculate_metric(is_training=True)
        steps.append([metric["loss"], metric["grad_norm"], metric["learning rate"]])
    saved = model.save("last", output_dir=output_dir)
    weights = {name: hash_of(tensor) for name, tensor in model.get_state_dict().items()}
    return {"steps": steps, "weights": weights, "saved": Path(str(saved)).name}


def main() -> None:
    """As a rank of torchrun."""
    twinkle.initialize(mode="local", groups=[GROUP], seed=SEED)
    came_to = train(Path(sys.argv[1]), Path("output"))
    assert "ray" not in sys.modules, "what runs under torchrun needs no Ray"
    if twinkle.is_master():
        Path("came_to.json").write_text(json.dumps(came_to))


if __name__ == "__main__":
    main()
