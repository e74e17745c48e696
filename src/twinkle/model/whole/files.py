"""A model that was trained whole, as the directory that transformers reads, and where its training stood.

    config.json, model*.safetensors, ...   what ``save_pretrained`` writes, and the tokenizer's files
    optimizer.safetensors                  exp_avg.<name>, exp_avg_sq.<name>; the step in the metadata

Everything is bytes in memory; where they go is for others to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from twinkle.checkpoint_engine.peft import MOMENTS, STEP_METADATA
from twinkle.checkpoint_engine.tensor_file import copy_checked, read_metadata, read_tensors, write_tensors
from twinkle.core.errors import InvalidInput
from twinkle.core.file_names import ADAPTER_CONFIG_FILE, OPTIMIZER_FILE, TRAINING_FILES
from twinkle.hub.tokenizer_files import tokenizer_files
from twinkle.model.weight_files import load_model, save_model
from twinkle.model.whole.core import WholeModelCore
from twinkle.module.lora import LoraAdapter
from twinkle.module.whole import WHOLE


def export_whole(core: WholeModelCore, adapter: LoraAdapter, folder: str, *, with_optimizer: bool) -> dict[str, bytes]:
    """The files of a copy of the model of ``folder``; ``with_optimizer`` adds what training needs to go on."""
    with TemporaryDirectory(prefix="twinkle-whole-") as made:
        with core.pool.lent(adapter):
            save_model(Path(made), core.model.state_dict(), core.model)
        files = {path.name: path.read_bytes() for path in sorted(Path(made).iterdir())}
    files |= tokenizer_files(folder)
    if with_optimizer:
        moments = {
            f"{moment}.{name}": values
            for moment, buffer in _moments(adapter).items()
            for name, values in core.pool.layout.tensors(buffer).items()
        }
        files[OPTIMIZER_FILE] = write_tensors(moments, metadata=(STEP_METADATA, str(adapter.step)))
    return files


def import_whole(
    core: WholeModelCore, files: Mapping[str, bytes], *, with_optimizer: bool, trainable: bool = True
) -> LoraAdapter:
    """A copy of the model from such files; without the optimizer training starts with fresh moments at step 0.

    Raises:
        InvalidInput: They are not this model's, or lack what is asked for.
    """
    if ADAPTER_CONFIG_FILE in files:
        raise InvalidInput("path", "holds an adapter, and this run trains the whole model; load it into a run of one")
    adapter = core.pool.create(WHOLE, trainable=trainable)
    with TemporaryDirectory(prefix="twinkle-whole-") as made:
        for name in files.keys() - TRAINING_FILES:
            (Path(made) / name).write_bytes(files[name])
        optional = frozenset({*core.model.all_tied_weights_keys, *dict(core.model.named_buffers())})
        with core.pool.lent(adapter), torch.no_grad():
            load_model(Path(made), dict(core.model.named_parameters()), optional=optional, model=core.model)
    adapter.publish()
    if with_optimizer:
        _fill_moments(core, adapter, files)
    return adapter


def _fill_moments(core: WholeModelCore, adapter: LoraAdapter, files: Mapping[str, bytes]) -> None:
    if OPTIMIZER_FILE not in files:
        raise InvalidInput(OPTIMIZER_FILE, "is missing from the checkpoint; it was saved without the optimizer")
    content = files[OPTIMIZER_FILE]
    step = read_metadata(OPTIMIZER_FILE, content).get(STEP_METADATA, "")
    if not step.isascii() or not step.isdigit():
        raise InvalidInput(OPTIMIZER_FILE, "its metadata does not hold the step")
    places = {
        f"{moment}.{name}": values
        for moment, buffer in _moments(adapter).items()
        for name, values in core.pool.layout.tensors(buffer).items()
    }
    copy_checked(OPTIMIZER_FILE, read_tensors(OPTIMIZER_FILE, content), places)
    if bool((adapter.exp_avg_sq < 0).any()):
        raise InvalidInput(OPTIMIZER_FILE, "holds a negative second moment")
    adapter.step = int(step)


def _moments(adapter: LoraAdapter) -> dict[str, torch.Tensor]:
    return dict(zip(MOMENTS, (adapter.exp_avg, adapter.exp_avg_sq), strict=True))
