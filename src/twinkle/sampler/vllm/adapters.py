"""Adapters as PEFT directories on disk, which is how vLLM takes them.

vLLM knows an adapter by an integer and by a name: the integer addresses weights in its slots, name and path go into the
keys of its prefix cache. An integer that is used again would find the slots of whoever had it before, so a number is
never given out twice; the name is the hash of the content, so cached keys and values belong to these very weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from twinkle.checkpoint_engine.peft import CONFIG_FILE, WEIGHTS_FILE, export_adapter
from twinkle.checkpoint_engine.peft_tensors import KEY_PREFIX
from twinkle.checkpoint_engine.tensor_file import write_tensors
from twinkle.module.lora import LoraAdapter
from twinkle.sampler.request import Adapter


@dataclass(frozen=True)
class AdapterFolder:
    """One version of an adapter, loaded."""

    name: str
    """Of the content: equal weights, equal name."""
    number: int
    """From 1; never used again for other weights."""
    path: Path


class AdapterFolders:
    """At most ``limit`` versions, the longest unused given up first; one that a request runs on is never given up.

    Args:
        root: A private folder of this process.
        limit: Versions kept while nobody uses them, those in use included.
        base_model: Written into the files.
        load: Makes vLLM load a version; what it raises is the request's error.
        unload: Makes vLLM forget one.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit: int,
        base_model: str,
        load: Callable[[AdapterFolder], None],
        unload: Callable[[AdapterFolder], None],
    ) -> None:
        self._root = root
        self._limit = limit
        self._base_model = base_model
        self._load = load
        self._unload = unload
        self._numbers = count(1)
        self._loaded: OrderedDict[str, AdapterFolder] = OrderedDict()
        self._users: dict[str, int] = {}
        self._known_names: WeakKeyDictionary[LoraAdapter, str] = WeakKeyDictionary()

    @property
    def loaded(self) -> list[AdapterFolder]:
        """The versions kept now, the longest unused first."""
        return list(self._loaded.values())

    def acquire(self, adapter: Adapter) -> AdapterFolder:
        """Returns the folder of the weights the adapter has now, loaded; each call needs a ``release``.

        Raises whatever loading raises; nothing is kept then.
        """
        # The weights of an adapter that is not trained stay as they are: no need to look at them for every request.
        name = self._known_names.get(adapter) if isinstance(adapter, LoraAdapter) else None
        if name is None or name not in self._loaded:
            files = export_adapter(adapter, self._base_model) if isinstance(adapter, LoraAdapter) else adapter.files
            name = _name_of(files)
            if name not in self._loaded:
                self._loaded[name] = self._write(name, files)
            if isinstance(adapter, LoraAdapter) and not adapter.trainable:
                self._known_names[adapter] = name
        self._loaded.move_to_end(name)
        self._users[name] = self._users.get(name, 0) + 1
        self._give_up_excess()
        return self._loaded[name]

    def release(self, folder: AdapterFolder) -> None:
        """Ends the use that ``acquire`` began."""
        self._users[folder.name] -= 1
        if not self._users[folder.name]:
            del self._users[folder.name]
        self._give_up_excess()

    def _write(self, name: str, files: Mapping[str, bytes]) -> AdapterFolder:
        folder = AdapterFolder(name, next(self._numbers), self._root / name)
        folder.path.mkdir(mode=0o700)
        try:
            for file_name, content in files.items():
                (folder.path / file_name).write_bytes(content)
            self._load(folder)
        except BaseException:
            shutil.rmtree(folder.path)
            raise
        return folder

    def _give_up_excess(self) -> None:
        unused = [name for name in self._loaded if name not in self._users]
        for name in unused[: max(0, len(self._loaded) - self._limit)]:
            folder = self._loaded.pop(name)
            self._unload(folder)
            shutil.rmtree(folder.path)


def zero_files(path: str, in_features: int, out_features: int) -> dict[str, bytes]:
    """Returns the files of an adapter of rank 1 that adds nothing to the output of the module at ``path``."""
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [path.rpartition(".")[2]]}
    tensors = {
        f"{KEY_PREFIX}{path}.lora_A.weight": torch.zeros(1, in_features),
        f"{KEY_PREFIX}{path}.lora_B.weight": torch.zeros(out_features, 1),
    }
    return {
        CONFIG_FILE: json.dumps(config).encode(),
        WEIGHTS_FILE: write_tensors(tensors, metadata=("adapter", "zeros")),
    }


def _name_of(files: Mapping[str, bytes]) -> str:
    assert WEIGHTS_FILE in files, "the files of an adapter"
    digest = hashlib.sha256()
    for file_name in sorted(files):
        digest.update(f"{file_name}\0{len(files[file_name])}\0".encode())
        digest.update(files[file_name])
    return digest.hexdigest()
