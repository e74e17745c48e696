"""A training script of several ranks (``harness.forked_ranks``), on the CPU: ``MODELS OUTPUT EARLIER KIND...``.

A kind is what is trained, the layout, and the model's folder if it is not the plain one: ``lora fsdp hybrid``.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from torch import distributed
from transformers import core_model_loading
from transformers.distributed import sharding_utils

import twinkle
from harness.training import make_rows
from twinkle.dataset import DatasetMeta, PackingDataset
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TwinkleModel

LENGTHS = (7, 4, 9, 5)
STEPS = 4
HALF = 3
"""Within a window of two."""
TWO_RANKS = (
    "fused dp",
    "lora dp",
    "full dp",
    "lora fsdp",
    "full fsdp",
    "lora ulysses",
    "full ulysses hybrid",
    "left fsdp-ulysses hybrid",
    "packed fsdp-ulysses",
    "bins ulysses",
    "bins fsdp-ulysses hybrid",
    "full fsdp moe",
    "lora fsdp-ep moe",
    "full fsdp-ep moe",
    "full dp-ep moe",
    "full fsdp-ep missed",
    "full fsdp-ep deepseek",
    "lora fsdp-ep deepseek",
    "grpo fsdp-ulysses hybrid",
    "micro fsdp",
    "fp16 fsdp",
    "full ulysses capped",
    "left fsdp-ulysses sinks",
    "embedding fsdp",
)
FOUR_RANKS = ("lora hsdp", "full hsdp-ulysses", "full hsdp-ep moe", "lora hsdp-ulysses-ep moe")
EIGHT_RANKS = ("lora document hybrid", "full document hybrid", "full document-ulysses-ep moe")
EARLIER = {"lora hsdp": "lora fsdp", "full hsdp-ep moe": "full fsdp-ep moe"}
"""Of four ranks: whose training of two they go on with."""
LAYOUTS: dict[str, dict[str, int]] = {
    "dp": {"dp_size": 2},
    "fsdp": {"fsdp_size": 2},
    "ulysses": {"dp_size": 2, "ulysses_size": 2},
    "fsdp-ulysses": {"fsdp_size": 2, "ulysses_size": 2},
    "fsdp-ep": {"fsdp_size": 2, "ep_size": 2},
    "dp-ep": {"dp_size": 2, "ep_size": 2},
    "hsdp-ep": {"dp_size": 2, "fsdp_size": 2, "ep_size": 2},
    "hsdp-ulysses-ep": {"dp_size": 2, "fsdp_size": 2, "ulysses_size": 2, "ep_size": 2},
    "document": {"fsdp_size": 4, "dp_size": 2},
    "document-ulysses-ep": {"fsdp_size": 4, "dp_size": 2, "ulysses_size": 2, "ep_size": 4},
    "hsdp": {"dp_size": 2, "fsdp_size": 2},
    "hsdp-ulysses": {"dp_size": 2, "fsdp_size": 2, "ulysses_size": 2},
}
PLAIN = "plain"
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25, -0.25]
PROCESSORS: dict[str, dict[str, Any]] = {"left": {"padding_side": "left"}, "packed": {"padding_free": True}}


def model_of(kind: str) -> str:
    return kind.split()[2] if len(kind.split()) > 2 else PLAIN


def make_model(kind: str, models_dir: Path, mesh: twinkle.DeviceMesh | None) -> TwinkleModel:
    what = kind.split()[0]
    model_dir = str(models_dir / model_of(kind))
    make: Any = MultiLoraTransformersModel if what == "fused" else TransformersModel
    half = {"mixed_precision": "fp16", "grad_scaler_config": {"init_scale": 256.0}} if what == "fp16" else {}
    model: TwinkleModel = make(model_id=model_dir, device_mesh=mesh, **half)
    if what in ("lora", "fused"):
        model.add_adapter_to_model(
            "a", peft.LoraConfig(r=4, target_modules="all-linear"), gradient_accumulation_steps=2
        )
    model.group("").set_accumulation(2)
    if what == "grpo":
        model.set_loss("GRPOLoss", epsilon=0.2, entropy_coef=0.01)
    if what == "embedding":
        model.set_loss("InfonceLoss", include_dd=True)
    if what in PROCESSORS:
        model.set_processor("InputProcessor", **PROCESSORS[what])
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=4)
    return model


def packed_together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as a packed data set hands them out: several in one."""
    encoded = [
        {"input_ids": row["input_ids"], "labels": row["labels"], "length": len(row["input_ids"])} for row in rows
    ]
    dataset = PackingDataset(DatasetMeta(data=encoded))
    dataset.pack_dataset()
    return [dataset[number] for number in range(len(dataset))]


def arguments_of(kind: str) -> dict[str, Any]:
    """Of each pass: of seven rows on two ranks, one has two parts and the other one."""
    what = kind.split()[0]
    ours = {"grpo": {"advantages": ADVANTAGES}, "micro": {"micro_batch_size": 3}, "embedding": {"task": "embedding"}}
    return ours.get(what, {})


def train(
    kind: str, model: TwinkleModel, first: int, last: int, mesh: twinkle.DeviceMesh | None
) -> list[dict[str, Any]]:
    told = []
    for step in range(first, last):
        rows = make_rows(step, LENGTHS * 2)[: 7 if kind.startswith("micro") else 8]
        if kind.startswith("embedding"):
            # Of the first rank one query with three documents, of the second two with one each.
            rows = [{**row, "labels": [int(number in (0, 4, 6))]} for number, row in enumerate(rows)]
        if kind.startswith("bins"):
            rows = packed_together(rows[:3]) + packed_together(rows[3:])
        model.forward_backward(inputs=rows if mesh is None else mesh.slice_data(rows), **arguments_of(kind))
        norm = model.clip_grad_and_step(max_grad_norm=0.5)
        if norm is not None:
            metrics = model.calculate_metric(True)
            told.append({"norm": norm, "loss": float(metrics["loss"]), "rate": metrics.get("learning rate")})
    return told


class BytesRead:
    """How many bytes of weights this rank has read since the last look, sharded or whole, of any checkpoint."""

    def __init__(self) -> None:
        self._num_bytes = 0
        loading: Any = core_model_loading
        self._read_share, self._read_whole = (
            sharding_utils.DtensorShardOperation.shard_tensor,
            loading._materialize_copy,
        )
        sharding_utils.DtensorShardOperation.shard_tensor = lambda *args, **options: self._counted(
            self._read_share(*args, **options)
        )
        loading._materialize_copy = lambda *args, **options: self._counted(self._read_whole(*args, **options))

    def _counted(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        self._num_bytes += 0 if tensor is None else tensor.nbytes
        return tensor

    def most(self) -> int:
        """Of the rank that has read most; all must ask together."""
        found = [0] * distributed.get_world_size()
        distributed.all_gather_object(found, self._num_bytes)
        self._num_bytes = 0
        return max(found)


def main() -> None:
    models_dir, output_dir, earlier_dir, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    twinkle.initialize(mode="local", global_device_mesh=mesh_of(kinds[0]))
    bytes_read = BytesRead()
    for kind in kinds:
        told = train_and_resume(kind, Path(models_dir), Path(output_dir) / kind, bytes_read)
        if kind in EARLIER:
            told["went_on"] = go_on(kind, Path(models_dir), Path(earlier_dir) / EARLIER[kind])
        if distributed.get_rank() == 0:
            (Path(output_dir) / kind / "told.json").write_text(json.dumps(told))
    distributed.barrier()
    distributed.destroy_process_group()


def mesh_of(kind: str) -> twinkle.DeviceMesh:
    return twinkle.DeviceMesh.from_sizes(**LAYOUTS[kind.split()[1]], device_type="cpu")


def train_and_resume(kind: str, models_dir: Path, output_dir: Path, bytes_read: BytesRead) -> dict[str, Any]:
    mesh = mesh_of(kind)
    # The first layout is the global one, which components take that are given none.
    given = None if kind.split()[1] == "dp" else mesh
    # Ranks that draw differently must still train one adapter.
    torch.manual_seed(distributed.get_rank())
    bytes_read.most()
    model = make_model(kind, models_dir, given)
    most_bytes = bytes_read.most()
    start = model.save("start", output_dir=output_dir)
    told = train(kind, model, 0, HALF, mesh)
    half = model.save("half", output_dir=output_dir, save_optimizer=True)
    told += train(kind, model, HALF, STEPS, mesh)
    state = model.get_state_dict()
    assert start and half
    resumed = make_model(kind, models_dir, given)
    resumed.resume_from_checkpoint(half)
    train(kind, resumed, HALF, STEPS, mesh)
    is_same = all(torch.equal(value, state[name]) for name, value in resumed.get_state_dict().items())
    digests: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(digests, digest(state))
    if distributed.get_rank() == 0:
        end = {name: value.contiguous() for name, value in state.items()}
        # Tied weights are one tensor, which the format does not know.
        copies = {name: value.clone() for name, value in end.items()}
        safetensors.torch.save_file(copies, output_dir / "end.safetensors")
    return {
        "told": told,
        "resumed_is_same": is_same,
        "ranks_are_same": len(set(digests)) == 1,
        "most_bytes_read": most_bytes,
    }


def go_on(kind: str, models_dir: Path, earlier_dir: Path) -> list[dict[str, Any]]:
    """The rest of a training that ranks of another number began."""
    mesh = mesh_of(kind)
    model = make_model(kind, models_dir, mesh)
    model.resume_from_checkpoint(earlier_dir / "half")
    return train(kind, model, HALF, STEPS, mesh)


def digest(state: dict[str, torch.Tensor]) -> str:
    content = b"".join(state[name].cpu().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
