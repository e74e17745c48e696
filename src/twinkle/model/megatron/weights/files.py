"""A whole model's weights as a folder that transformers reads."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PretrainedConfig

from twinkle.checkpoint_engine.directory import verify_tensors

COPIED = ("generation_config.json",)
"""Files beside the weights that training does not change."""


def save_published(folder: Path, state: Mapping[str, torch.Tensor], config: PretrainedConfig, source: Path) -> None:
    """Write weights by their published names, with the model's config, and read them back."""
    save_torch_state_dict({name: tensor.contiguous() for name, tensor in state.items()}, folder)
    stored = copy.deepcopy(config)
    stored.dtype = next(iter(state.values())).dtype
    stored.save_pretrained(folder)
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    verify_tensors(folder, state)
