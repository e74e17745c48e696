"""Whose weights a call samples with: never another's, and never silently the base model's."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twinkle.checkpoint_engine.peft import CONFIG_FILE, WEIGHTS_FILE
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.hub.model_path import resolve_model_id
from twinkle.module.lora import LoraAdapter
from twinkle.sampler.request import Adapter, AdapterFiles

MAX_ADAPTERS_FROM_FILES = 8


class KnownAdapters:
    """Adapters by name, by directory, and the one that training keeps in step (``sync``).

    Args:
        load: Makes an adapter of the files of a PEFT directory, or raises ``InvalidInput``.
    """

    def __init__(self, load: Callable[[Mapping[str, bytes]], Adapter]) -> None:
        self._load = load
        self._by_name: dict[str, Adapter | None] = {}
        self._by_content: OrderedDict[str, Adapter] = OrderedDict()
        self._synced: Adapter | None = None

    def add(self, name: str, config: Any) -> None:
        """Makes an adapter known: an adapter or its directory, or a config whose weights a sync brings later.

        A name that is known already gets the new one.
        """
        if not name:
            raise InvalidInput("adapter_name", "is empty; the empty name stands for the base model")
        if isinstance(config, LoraAdapter | AdapterFiles):
            self._by_name[name] = config
        elif isinstance(config, str | Path):
            self._by_name[name] = self._from_directory(str(config))
        else:
            self._by_name[name] = None

    def sync(self, files: Mapping[str, bytes], name: str) -> None:
        """Takes the weights that a training has now; calls that name no adapter sample with them from here on."""
        adapter = self._load(files)
        self._synced = adapter
        if name:
            self._by_name[name] = adapter

    def forget_synced(self) -> None:
        """Calls that name no adapter sample the base model again."""
        self._synced = None

    def find(self, name: str, path: str | Path | None) -> Adapter | None:
        """The adapter of a call; None for the base model, when nothing was synced.

        Raises:
            InvalidInput: It is not known, has no weights yet, or cannot be read.
        """
        if path is not None:
            if name:
                raise InvalidInput("adapter_path", f"comes with adapter_name {name}; send one of them")
            return self._from_directory(str(path))
        if not name:
            return self._synced
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise InvalidInput("adapter_name", f"{name} was not added to this sampler; known: {known}")
        adapter = self._by_name[name]
        if adapter is None:
            raise InvalidInput("adapter_name", f"{name} was added without weights; sync them, or pass adapter_path")
        return adapter

    def _from_directory(self, path: str) -> Adapter:
        try:
            folder = Path(resolve_model_id(path, field="adapter_path"))
        except ConfigError as error:
            raise InvalidInput("adapter_path", error.message.removeprefix("adapter_path: ")) from error
        try:
            files = {name: (folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
        except OSError as error:
            raise InvalidInput("adapter_path", f"{path} is not a PEFT directory: {error.strerror}") from error
        digest = hashlib.sha256(files[CONFIG_FILE] + b"\0" + files[WEIGHTS_FILE]).hexdigest()
        adapter = self._by_content.get(digest)
        if adapter is None:
            adapter = self._by_content[digest] = self._load(files)
        self._by_content.move_to_end(digest)
        while len(self._by_content) > MAX_ADAPTERS_FROM_FILES:
            self._by_content.popitem(last=False)
        return adapter
