"""Families with experts, latent attention and delta nets, and adapters, by Megatron on ranks on the CPU
(``harness.forked_ranks``): ``MODELS_DIR OUTPUT_DIR KIND...``.

A kind is a family of models, a layout, and what is trained: ``deepseek_v3 tp whole``, ``qwen3 pp lora``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
import transformers
from torch import distributed

import twinkle
from harness.training import make_rows
from twinkle.model import TransformersModel
from twinkle.model.megatron import MegatronModel
from twinkle.model.megatron.layout import leave_layout

LENGTHS = (7, 4, 70, 5)
STEPS = 3
HALF = 2
TWO_RANKS = (
    "qwen3 tp lora",
    "qwen2_moe pp lora",
    "qwen3_moe ep whole",
    "deepseek_v3 cp whole",
    "qwen3_5_text tp whole",
)
SOAKED = (
    "deepseek_v2 tp whole",
    "deepseek_v3 ep lora",
    "qwen3_5_moe_text ep whole",
    "qwen2 dp lora",
    "qwen2_moe tp whole",
    "qwen3 pp lora",
    "deepseek_v3 ep whole",
    "deepseek_v3 pp whole",
    "deepseek_v3 tp lora",
    "qwen3_5_text cp whole",
    "qwen3_5_text tp lora",
    "qwen3_moe ep-in-tp whole",
    "qwen2_moe ep-in-cp lora",
)
FOUR_RANKS = (
    "qwen3_moe tp-ep whole",
    "deepseek_v3 ep-pp lora",
    "qwen3_5_text cp-pp whole",
    "qwen2_moe cp-tp lora",
)
OTHER_AXES = (
    "qwen2 cp whole",
    "qwen3_moe pp whole",
    "qwen3_moe cp whole",
    "deepseek_v2 pp whole",
    "deepseek_v2 cp whole",
    "deepseek_v2 ep whole",
    "qwen3_5_moe_text tp whole",
    "qwen3_5_moe_text pp whole",
    "qwen3_5_moe_text cp whole",
)
"""With the others every family on every axis."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2},
    "dp": {"dp_size": 2},
    "cp": {"cp_size": 2},
    "ep": {"dp_size": 2, "ep_size": 2},
    "tp-ep": {"dp_size": 2, "tp_size": 2, "ep_size": 2},
    "ep-in-tp": {"tp_size": 2, "ep_size": 2},
    "ep-in-cp": {"cp_size": 2, "ep_size": 2},
    "ep-pp": {"pp_size": 2, "dp_size": 2, "ep_size": 2},
    "cp-pp": {"pp_size": 2, "cp_size": 2},
    "cp-tp": {"cp_size": 2, "tp_size": 2},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
TARGETS = {
    "qwen2_moe": ATTENTION + MLP,
    "qwen3_moe": ATTENTION,
    "deepseek_v3": LATENT,
    "qwen3_5_text": ATTENTION + DELTA_NET + MLP,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 32}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}
COMPRESSED = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 1.5,
}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
STATES = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**EXPERTS, **SHARED, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "deepseek_v2": {**EXPERTS, **COMPRESSED, **GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v3": {**EXPERTS, **COMPRESSED, **GROUPS, "rope_parameters": STRETCHED, "num_mtp_layers": 0},
    "qwen3_5_text": STATES,
    "qwen3_5_moe_text": {**EXPERTS, **SHARED, **STATES},
}


def make_family(folder: Path, family: str) -> None:
    """A tiny random model of a family, deep enough for two stages."""
    config = transformers.AutoConfig.for_model(
        family,
        **{
            "vocab_size": 289,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 1,
            **SIZES[family],
        },
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(buffer, -0.2, 0.2)
    model.save_pretrained(folder)


def make_adapter(folder: Path, models_dir: Path, family: str) -> None:
    """An adapter whose update is something."""
    model = TransformersModel(model_id=str(models_dir / family))
    torch.manual_seed(5)
    model.add_adapter_to_model(
        "default", peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS.get(family, ATTENTION + MLP))
    )
    for name, parameter in model.optimizer_group["default"].parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    folder.mkdir(parents=True, exist_ok=True)
    model._write_weights(model.group("default"), folder, is_writer=True)


def mesh_of(kind: str) -> twinkle.DeviceMesh:
    return twinkle.DeviceMesh.from_sizes(**LAYOUTS[kind.split()[1]], device_type="cpu")


def make_model(kind: str, models_dir: Path, *, by_megatron: bool) -> Any:
    family, _, what = kind.split()
    model: Any
    if by_megatron:
        model = MegatronModel(model_id=str(models_dir / family), device_mesh=mesh_of(kind))
    else:
        model = TransformersModel(model_id=str(models_dir / family))
    if what == "lora":
        model.add_adapter_to_model("default", str(models_dir / f"{family}-adapter"))
    # Steps as large as gradients are: what differs shows.
    model.set_optimizer("SGD", lr=0.1, momentum=0.9)
    return model


def train(model: Any, first: int, last: int, mesh: twinkle.DeviceMesh | None) -> list[dict[str, float]]:
    told = []
    for step in range(first, last):
        rows = make_rows(step, LENGTHS)
        model.forward_backward(inputs=rows[slice(None) if mesh is None else mesh.data_slice(len(rows))])
        norm = model.clip_grad_and_step(max_grad_norm=1.0)
        told.append({"norm": norm, "loss": float(model.calculate_metric(True)["loss"])})
    return told


def scored(model: Any, mesh: twinkle.DeviceMesh | None, *, disable_lora: bool = False) -> torch.Tensor:
    """The logits of this rank's rows, all of whose tokens are there."""
    rows = [{**row, "labels": row["input_ids"]} for row in make_rows(9, (66, 66))]
    own = slice(None) if mesh is None else mesh.data_slice(len(rows))
    found: torch.Tensor = model.forward_only(inputs=rows[own], return_logits=True, disable_lora=disable_lora)["logits"]
    return found


def run(kind: str, models_dir: Path, output_dir: Path) -> dict[str, Any]:
    mesh = mesh_of(kind)
    model = make_model(kind, models_dir, by_megatron=True)
    logits = {"logits": scored(model, mesh)}
    if kind.endswith("lora"):
        logits["base"] = scored(model, mesh, disable_lora=True)
    told = train(model, 0, HALF, mesh)
    half = model.save("half", output_dir=output_dir, save_optimizer=True)
    told += train(model, HALF, STEPS, mesh)
    model.save("end", output_dir=output_dir)
    merged = dict(model.send_weights(merge=True))
    resumed = make_model(kind, models_dir, by_megatron=True)
    resumed.resume_from_checkpoint(str(half))
    train(resumed, HALF, STEPS, mesh)
    state, again = model.get_state_dict(), resumed.get_state_dict()
    is_same = all(torch.equal(value, again[name]) for name, value in state.items())
    if distributed.get_rank() == 0:
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in logits.items()}, output_dir / "logits.safetensors"
        )
        if kind.endswith("lora"):
            safetensors.torch.save_file(
                {name: value.contiguous() for name, value in merged.items()}, output_dir / "merged.safetensors"
            )
    return {"told": told, "resumed_is_same": is_same}


def main() -> None:
    models_dir, output_dir, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    twinkle.initialize(mode="local", global_device_mesh=mesh_of(kinds[0]))
    for kind in kinds:
        told = run(kind, Path(models_dir), Path(output_dir) / kind)
        if distributed.get_rank() == 0:
            (Path(output_dir) / kind / "told.json").write_text(json.dumps(told))
        distributed.barrier()
        leave_layout()


if __name__ == "__main__":
    main()
