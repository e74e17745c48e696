"""A training script by Megatron on ranks (``harness.forked_ranks``), on the CPU: ``MODELS OUTPUT EARLIER KIND...``.

A kind is a family of models, a layout, and how it is trained if not in plain steps: ``qwen3 tp-pp grpo``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import distributed

import twinkle
from harness.training import make_rows
from twinkle.model import TransformersModel, TwinkleModel
from twinkle.model.megatron import MegatronModel
from twinkle.model.megatron.layout import leave_layout

LENGTHS = (7, 4, 9, 5, 6, 3, 8, 2)
STEPS = 4
HALF = 3
"""Within a window of two."""
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ("qwen3 one", "qwen2 one micro", "qwen3 one grpo", "qwen2 one pieces")),
    "two": (
        2,
        ("qwen3 tp", "tied tp grpo", "qwen2 pp", "tied pp micro", "qwen3 vpp micro", "qwen3 dp", "qwen3 cp"),
    ),
    "four": (4, ("tied tp-pp grpo", "qwen2 dp-tp")),
    "two, long": (
        2,
        (
            "qwen2 tp plain-sequence",
            "qwen3 pp grpo",
            "qwen2 dp whole-optimizer",
            "qwen2 tp entropy",
            "qwen3 pp packed",
            "qwen2 pp uneven",
            "qwen3 tp selective",
        ),
    ),
    "four, long": (4, ("qwen3 tp-pp", "qwen3 dp-pp micro", "qwen3 cp-pp", "qwen3 cp-tp", "qwen3 pp4 micro")),
}
"""By the start that runs them: how many ranks, and what they train."""
EARLIER = {"qwen2 dp-tp": "qwen2 pp"}
"""Whose training of other ranks a kind goes on with."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"dp_size": 1},
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2},
    "vpp": {"pp_size": 2, "vpp_size": 2},
    "dp": {"dp_size": 2},
    "cp": {"cp_size": 2},
    "pp4": {"pp_size": 4},
    "tp-pp": {"tp_size": 2, "pp_size": 2},
    "dp-pp": {"dp_size": 2, "pp_size": 2},
    "dp-tp": {"dp_size": 2, "tp_size": 2},
    "cp-pp": {"cp_size": 2, "pp_size": 2},
    "cp-tp": {"cp_size": 2, "tp_size": 2},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain-sequence": {"sequence_parallel": False, "recompute_granularity": None},
    "whole-optimizer": {"use_distributed_optimizer": False},
    "uneven": {"num_layers_in_first_pipeline_stage": 3},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25, -0.25]


def way_of(kind: str) -> str:
    return kind.split()[2] if len(kind.split()) > 2 else "plain"


def mesh_of(kind: str) -> twinkle.DeviceMesh:
    return twinkle.DeviceMesh.from_sizes(**LAYOUTS[kind.split()[1]], device_type="cpu")


def make_model(kind: str, models_dir: Path, *, by_megatron: bool) -> TwinkleModel:
    folder, way = str(models_dir / kind.split()[0]), way_of(kind)
    model: Any
    if by_megatron:
        model = MegatronModel(model_id=folder, device_mesh=mesh_of(kind), **SETTINGS.get(way, {}))
    else:
        model = TransformersModel(model_id=folder)
    model.group("").set_accumulation(2)
    if way in ("grpo", "entropy"):
        model.set_loss("GRPOLoss", epsilon=0.2, entropy_coef=0.01 if way == "entropy" else 0.0)
    if way == "packed":
        model.set_processor("InputProcessor", padding_free=True)
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=4)
    return model  # type: ignore[no-any-return]


def train(kind: str, model: TwinkleModel, first: int, last: int, mesh: twinkle.DeviceMesh | None) -> list[Any]:
    told = []
    way = way_of(kind)
    kwargs: dict[str, Any] = {"micro_batch_size": 3} if way in ("micro", "grpo") else {}
    for step in range(first, last):
        rows = make_rows(step, LENGTHS)
        own = slice(None) if mesh is None else mesh.data_slice(len(rows))
        if way in ("grpo", "entropy"):
            kwargs["advantages"] = ADVANTAGES[own]
        if way == "pieces":
            model.forward(inputs=rows[own], **kwargs)
            model.calculate_loss()
            model.backward()
        else:
            model.forward_backward(inputs=rows[own], **kwargs)
        norm = model.clip_grad_and_step(max_grad_norm=0.5)
        if norm is not None:
            metrics = model.calculate_metric(True)
            told.append({"norm": norm, "loss": float(metrics["loss"]), "rate": metrics.get("learning rate")})
    return told


def scored(model: TwinkleModel, mesh: twinkle.DeviceMesh | None) -> torch.Tensor:
    """The logits of this rank's rows, all of whose tokens are there."""
    rows = [{**row, "labels": row["input_ids"]} for row in make_rows(9, (6, 6, 6, 6))]
    own = slice(None) if mesh is None else mesh.data_slice(len(rows))
    found = model.forward_only(inputs=rows[own], return_logits=True)["logits"]
    assert isinstance(found, torch.Tensor)
    return found


def train_and_resume(kind: str, models_dir: Path, output_dir: Path) -> dict[str, Any]:
    mesh = mesh_of(kind)
    model = make_model(kind, models_dir, by_megatron=True)
    logits = scored(model, mesh)
    told = train(kind, model, 0, HALF, mesh)
    half = model.save("half", output_dir=output_dir, save_optimizer=True)
    told += train(kind, model, HALF, STEPS, mesh)
    model.save("end", output_dir=output_dir)
    resumed = make_model(kind, models_dir, by_megatron=True)
    resumed.resume_from_checkpoint(str(half))  # type: ignore[attr-defined]
    train(kind, resumed, HALF, STEPS, mesh)
    state, again = model.get_state_dict(), resumed.get_state_dict()
    is_same = all(torch.equal(value, again[name]) for name, value in state.items())
    if distributed.get_rank() == 0:
        safetensors.torch.save_file({"logits": logits.contiguous()}, output_dir / "logits.safetensors")
    ranks: list[Any] = [told] * distributed.get_world_size()
    distributed.all_gather_object(ranks, told)
    return {"told": told, "resumed_is_same": is_same, "every_rank_is_told": all(each == told for each in ranks)}


def go_on(kind: str, models_dir: Path, earlier_dir: Path) -> list[Any]:
    """The rest of a training that another layout began."""
    model = make_model(kind, models_dir, by_megatron=True)
    model.resume_from_checkpoint(earlier_dir / EARLIER[kind] / "half")
    return train(kind, model, HALF, STEPS, mesh_of(kind))


def main() -> None:
    models_dir, output_dir, earlier_dir, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    twinkle.initialize(mode="local", global_device_mesh=mesh_of(kinds[0]))
    for kind in kinds:
        told = train_and_resume(kind, Path(models_dir), Path(output_dir) / kind)
        if kind in EARLIER:
            told["went_on"] = go_on(kind, Path(models_dir), Path(earlier_dir))
        if distributed.get_rank() == 0:
            (Path(output_dir) / kind / "told.json").write_text(json.dumps(told))
        distributed.barrier()
        leave_layout()


if __name__ == "__main__":
    main()
