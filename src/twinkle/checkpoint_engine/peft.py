"""Adapters as PEFT directories: what a tenant downloads, uploads and hands to other tools.

    adapter_config.json          what plain PEFT reads, nothing more
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight and .lora_B.weight; our config in the metadata
    optimizer.safetensors        exp_avg.<key>, exp_avg_sq.<key>; the step in the metadata (only with the optimizer)

Everything is bytes in memory; where they go is for others to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

import torch

from twinkle.checkpoint_engine.tensor_file import copy_checked, read_metadata, read_tensors, write_tensors
from twinkle.core.errors import InvalidInput
from twinkle.model.multi_lora import MultiLoraTransformersModel
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.module.targets import kind_of

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
KEY_PREFIX = "base_model.model."
CONFIG_METADATA = "lora_config"
STEP_METADATA = "step"

REFUSED_SETTINGS: Mapping[str, object] = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
}
"""Settings of PEFT that change what an adapter computes, with the only value that is supported."""


def export_adapter(adapter: LoraAdapter, base_model_name: str, *, with_optimizer: bool = False) -> dict[str, bytes]:
    """The files of an adapter; ``with_optimizer`` adds what training needs to go on."""
    paths = [shape.path for shape in adapter.layout.shapes]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": adapter.config.rank,
        "lora_alpha": adapter.config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({path.rpartition(".")[2] for path in paths}),
        "inference_mode": True,
        "init_lora_weights": True,
        **REFUSED_SETTINGS,
    }
    files = {
        CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True).encode(),
        WEIGHTS_FILE: write_tensors(
            _named_views(adapter, adapter.params),
            metadata=(CONFIG_METADATA, json.dumps(asdict(adapter.config), sort_keys=True)),
        ),
    }
    if with_optimizer:
        if not adapter.trainable:
            raise InvalidInput("model_id", "this adapter was loaded for sampling only and has no optimizer state")
        files[OPTIMIZER_FILE] = write_tensors(_optimizer_views(adapter), metadata=(STEP_METADATA, str(adapter.step)))
    return files


def read_config(files: Mapping[str, bytes]) -> LoraConfig:
    """The config of exported files; for files PEFT wrote, what trains is read off the tensors' names."""
    settings = _read_settings(files)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)):
        raise InvalidInput(CONFIG_FILE, "r must be an integer and lora_alpha a number")
    weights = _file(files, WEIGHTS_FILE)
    stored = read_metadata(WEIGHTS_FILE, weights).get(CONFIG_METADATA)
    if stored is None:
        return _config_of_foreign_file(rank, float(alpha), weights)
    try:
        config = LoraConfig(**json.loads(stored))
    except (TypeError, ValueError) as error:
        raise InvalidInput(WEIGHTS_FILE, "its metadata does not hold a LoRA config") from error
    if (config.rank, config.alpha) != (rank, alpha):
        raise InvalidInput(CONFIG_FILE, f"r and lora_alpha do not match {WEIGHTS_FILE}")
    return config


def import_adapter(
    model: MultiLoraTransformersModel, files: Mapping[str, bytes], *, with_optimizer: bool, trainable: bool = True
) -> LoraAdapter:
    """An adapter from its files; without the optimizer training starts with fresh moments at step 0."""
    adapter = model.pool.create_empty(read_config(files), trainable=trainable)
    copy_checked(WEIGHTS_FILE, _read_weights(_file(files, WEIGHTS_FILE)), _named_views(adapter, adapter.params))
    adapter.publish()
    if with_optimizer:
        if not trainable:
            raise InvalidInput(OPTIMIZER_FILE, "an adapter that is not trained has no optimizer to load")
        content = _file(files, OPTIMIZER_FILE)
        copy_checked(OPTIMIZER_FILE, read_tensors(OPTIMIZER_FILE, content), _optimizer_views(adapter))
        if bool((adapter.exp_avg_sq < 0).any()):
            raise InvalidInput(OPTIMIZER_FILE, "holds a negative second moment")
        adapter.step = _read_step(content)
    return adapter


def _named_views(adapter: LoraAdapter, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for path, pair in adapter.layout.views(buffer).items():
        named[f"{KEY_PREFIX}{path}.lora_A.weight"] = pair.a
        named[f"{KEY_PREFIX}{path}.lora_B.weight"] = pair.b
    return named


def _optimizer_views(adapter: LoraAdapter) -> dict[str, torch.Tensor]:
    moments = {"exp_avg": adapter.exp_avg, "exp_avg_sq": adapter.exp_avg_sq}
    return {
        f"{moment}.{key}": view
        for moment, buffer in moments.items()
        for key, view in _named_views(adapter, buffer).items()
    }


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise InvalidInput(name, "is missing from the checkpoint")
    return files[name]


def _read_settings(files: Mapping[str, bytes]) -> dict[str, object]:
    try:
        settings = json.loads(_file(files, CONFIG_FILE))
    except ValueError as error:
        raise InvalidInput(CONFIG_FILE, "is not JSON") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise InvalidInput(CONFIG_FILE, "does not describe a LoRA adapter")
    for name, supported in REFUSED_SETTINGS.items():
        if settings.get(name) not in (supported, None):
            raise InvalidInput(CONFIG_FILE, f"{name} is {settings[name]!r}, only {supported!r} is supported")
    return settings


def _read_weights(content: bytes) -> dict[str, torch.Tensor]:
    tensors = read_tensors(WEIGHTS_FILE, content)
    # PEFT stores the base model's own weight beside the adapter when the output projection is a target.
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(".base_layer.weight")}


def _config_of_foreign_file(rank: int, alpha: float, weights: bytes) -> LoraConfig:
    kinds = {
        kind_of(key.removeprefix(KEY_PREFIX).rpartition(".lora_")[0]) or "unembed" for key in _read_weights(weights)
    }
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
    )


def _read_step(content: bytes) -> int:
    step = read_metadata(OPTIMIZER_FILE, content).get(STEP_METADATA, "")
    if not step.isascii() or not step.isdigit():
        raise InvalidInput(OPTIMIZER_FILE, "its metadata does not hold the step")
    return int(step)
