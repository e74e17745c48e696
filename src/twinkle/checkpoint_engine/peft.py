"""Adapters as PEFT directories: what a tenant downloads, uploads and hands to other tools.

    adapter_config.json          what plain PEFT reads, nothing more (``peft_settings``)
    adapter_model.safetensors    the pairs under PEFT's names (``peft_tensors``); our config in the metadata
    optimizer.safetensors        exp_avg.<key>, exp_avg_sq.<key>; the step in the metadata (only with the optimizer)

Everything is bytes in memory; where they go is for others to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from twinkle.checkpoint_engine.peft_settings import (
    CONFIG_FILE,
    config_of,
    read_settings,
    scaling_settings,
    write_settings,
)
from twinkle.checkpoint_engine.peft_tensors import fill_buffer, published_key, stored_tensors, trained_paths
from twinkle.checkpoint_engine.tensor_file import read_metadata, read_tensors, write_tensors
from twinkle.core.errors import InvalidInput
from twinkle.core.file_names import ADAPTER_WEIGHTS_FILE, OPTIMIZER_FILE
from twinkle.module.adapter import AS_LOADED, AdapterPool, StoredPaths
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.module.targets import Target, beside_experts

__all__ = ["CONFIG_FILE", "OPTIMIZER_FILE", "WEIGHTS_FILE", "export_adapter", "import_adapter", "read_config"]

WEIGHTS_FILE = ADAPTER_WEIGHTS_FILE
CONFIG_METADATA = "lora_config"
STEP_METADATA = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")


def export_adapter(adapter: LoraAdapter, base_model_name: str, *, with_optimizer: bool = False) -> dict[str, bytes]:
    """The files of an adapter; ``with_optimizer`` adds what training needs to go on."""
    files = {
        CONFIG_FILE: write_settings(adapter, base_model_name),
        WEIGHTS_FILE: write_tensors(
            stored_tensors(adapter.layout, adapter.params.cpu()),  # from a device in one copy, not in one for each
            metadata=(CONFIG_METADATA, json.dumps(adapter.config.to_json(), sort_keys=True)),
        ),
    }
    if with_optimizer:
        if not adapter.trainable:
            raise InvalidInput("model_id", "this adapter was loaded for sampling only and has no optimizer state")
        moments = {
            f"{moment}.{key}": tensor
            for moment, buffer in _moments(adapter).items()
            for key, tensor in stored_tensors(adapter.layout, buffer.cpu()).items()
        }
        files[OPTIMIZER_FILE] = write_tensors(moments, metadata=(STEP_METADATA, str(adapter.step)))
    return files


def read_config(
    files: Mapping[str, bytes],
    targets: Sequence[Target],
    paths: StoredPaths = AS_LOADED,
) -> LoraConfig:
    """The config of exported files; for files PEFT wrote, what trains is read off the tensors' names.

    ``targets`` are those of the base model, ``paths`` says what it calls them in files.
    """
    settings = read_settings(_file(files, CONFIG_FILE))
    weights = _file(files, WEIGHTS_FILE)
    stored = read_metadata(WEIGHTS_FILE, weights).get(CONFIG_METADATA)
    if stored is None:
        tensors = _read_weights(weights, paths)
        trained = trained_paths(WEIGHTS_FILE, tensors, targets, settings["target_parameters"], paths)
        if not trained:
            raise InvalidInput(WEIGHTS_FILE, "holds no LoRA weights")
        return config_of(settings, trained, targets, paths)
    try:
        config = LoraConfig.from_json(json.loads(stored))
        expected = scaling_settings(config, beside_experts(targets), paths)
    except (TypeError, ValueError) as error:
        raise InvalidInput(WEIGHTS_FILE, "its metadata does not hold a LoRA config") from error
    for name, value in expected.items():
        if settings.get(name, value) != value:
            raise InvalidInput(CONFIG_FILE, f"{name} does not match the metadata of {WEIGHTS_FILE}; export it again")
    return config


def import_adapter(
    pool: AdapterPool, files: Mapping[str, bytes], *, with_optimizer: bool, trainable: bool = True
) -> LoraAdapter:
    """An adapter from its files; without the optimizer training starts with fresh moments at step 0."""
    adapter = pool.create_empty(read_config(files, pool.targets, pool.paths), trainable=trainable)
    fill_buffer(WEIGHTS_FILE, _read_weights(_file(files, WEIGHTS_FILE), pool.paths), adapter.layout, adapter.params)
    adapter.publish()
    if with_optimizer:
        if not trainable:
            raise InvalidInput(OPTIMIZER_FILE, "an adapter that is not trained has no optimizer to load")
        _fill_moments(adapter, _file(files, OPTIMIZER_FILE))
    return adapter


def _fill_moments(adapter: LoraAdapter, content: bytes) -> None:
    tensors = read_tensors(OPTIMIZER_FILE, content)
    for moment, buffer in _moments(adapter).items():
        prefix = f"{moment}."
        own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        fill_buffer(OPTIMIZER_FILE, own, adapter.layout, buffer)
    if len(tensors) != len(MOMENTS) * 2 * len(adapter.layout.shapes):
        raise InvalidInput(OPTIMIZER_FILE, f"holds tensors besides {' and '.join(MOMENTS)}")
    if bool((adapter.exp_avg_sq < 0).any()):
        raise InvalidInput(OPTIMIZER_FILE, "holds a negative second moment")
    adapter.step = _read_step(content)


def _moments(adapter: LoraAdapter) -> dict[str, torch.Tensor]:
    return dict(zip(MOMENTS, (adapter.exp_avg, adapter.exp_avg_sq), strict=True))


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise InvalidInput(name, "is missing from the checkpoint")
    return files[name]


def _read_weights(content: bytes, paths: StoredPaths) -> dict[str, torch.Tensor]:
    tensors = read_tensors(WEIGHTS_FILE, content)
    # PEFT stores the base model's own weight beside the adapter when the output projection is a target.
    return {
        published_key(key, paths): tensor for key, tensor in tensors.items() if not key.endswith(".base_layer.weight")
    }


def _read_step(content: bytes) -> int:
    step = read_metadata(OPTIMIZER_FILE, content).get(STEP_METADATA, "")
    if not step.isascii() or not step.isdigit():
        raise InvalidInput(OPTIMIZER_FILE, "its metadata does not hold the step")
    return int(step)
