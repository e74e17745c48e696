"""A base model with an adapter's update in its weights: a folder like the base's own, file by file.

Each tensor is read, changed and written by itself, in the numbers that the base is stored in. Where one matrix is both
embedding and output head and the adapter trains the head, the model gets a head of its own: an update of the shared
matrix would change what goes in as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from twinkle.workers.jobs.export.skeleton import CONFIG_FILE, TIED, Skeleton
from twinkle.workers.jobs.export.tensor_files import (
    INDEX_FILE,
    PlannedTensor,
    TensorFolder,
    write_index,
    write_tensor_file,
)
from twinkle.workers.jobs.export.updates import TrainedWeight, Updates

_WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack", ".ot", ".npz"}
)
_LEFT_OUT = frozenset({"readme.md", CONFIG_FILE})
"""What is written anew, or says of the base what is not true of what was made from it."""


class MergedModel:
    """The files of a merged model, each of which can be written by itself."""

    def __init__(self, base: TensorFolder, skeleton: Skeleton, weights: Sequence[TrainedWeight]) -> None:
        """Plan the files.

        Raises:
            ConfigError: The adapter changes what the files do not hold.
        """
        self._base = base
        self._skeleton = skeleton
        self._updates = Updates(skeleton, list(weights), frozenset(base.tensors))
        self._head = self._updates.untied_head
        self._embedding = self._updates.embedding_file_name()
        self.files = {file: self._planned(file) for file in base.files}

    @property
    def size_bytes(self) -> int:
        """What all its tensors take."""
        return sum(tensor.size_bytes for tensors in self.files.values() for tensor in tensors)

    @property
    def has_own_head(self) -> bool:
        """Whether the output head is its own, where it was the embedding in the base model."""
        return self._head is not None

    def stored_dtype(self, weight: TrainedWeight) -> torch.dtype:
        """The numbers that a trained weight is stored in."""
        name = self._updates.stored_names[weight.name]
        return self._base.dtype(self._embedding if name == self._head else name)

    def write(self, file: str, folder: Path) -> str:
        """Write one file; its SHA-256, the same whenever it is written."""
        return write_tensor_file(folder / file, self.files[file], self.tensor)

    @torch.no_grad()
    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is stored."""
        stored = self._base.read(self._embedding if name == self._head else name)
        update = self._updates.of(name)
        return stored if update is None else stored.float().add_(update).to(stored.dtype)

    def write_others(self, folder: Path) -> list[str]:
        """Write what is no weights: config, tokenizer, licence, index; their names."""
        names = []
        for path in sorted(self._base.folder.iterdir()):
            is_kept = path.name.lower() not in _LEFT_OUT and not path.name.startswith(".")
            if path.is_file() and is_kept and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
                names.append(path.name)
        config = json.dumps(self._config(), indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
        names.append(CONFIG_FILE)
        if len(self.files) > 1:
            write_index(folder / INDEX_FILE, self.files)
            names.append(INDEX_FILE)
        return sorted(names)

    def _planned(self, file: str) -> list[PlannedTensor]:
        planned = []
        for stored in self._base.of_file(file):
            if stored.name == self._head:
                continue  # a copy of the embedding, which the config says is not read
            planned.append(PlannedTensor(stored.name, stored.dtype, stored.shape))
            if self._head is not None and stored.name == self._embedding:
                planned.append(PlannedTensor(self._head, stored.dtype, stored.shape))
        return planned

    def _config(self) -> dict[str, Any]:
        config = dict(self._skeleton.written)
        if self._head is not None:
            config[TIED] = False
            text = config.get("text_config")
            if isinstance(text, dict):
                config["text_config"] = {**text, TIED: False}
        return config
