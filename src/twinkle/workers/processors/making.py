"""Objects of the training library, made and called as clients say: of our own classes, and of what was opened alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.core.model_names import plain_model_name
from twinkle.core.processors import MAX_BATCH_ROWS, MAX_SOURCE_BYTES, REFERENCES, is_processor_id
from twinkle.plugin.loading import require_approved
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.files.reading import stretches_of
from twinkle.storage.opened_folders import place_in
from twinkle.wire.dataset_meta import FIELD, RowsOf, is_hub_id, read_dataset_meta
from twinkle.workers.processors.orders import FileSource, Sources

_ROOMS: Mapping[str, str] = {
    "dataset": "twinkle.dataset",
    "dataloader": "twinkle.dataloader",
    "preprocessor": "twinkle.preprocessor",
    "processor": "twinkle.processor",
    "reward": "twinkle.reward",
    "template": "twinkle.template",
}
_BOUNDED = ("batch_size", "min_batch_size", "packing_interval")
_PLUGIN = "://"


def class_of(processor_type: str, class_type: str) -> Callable[..., Any]:
    """One of our classes, by the names that were checked against the table when the call was accepted."""
    made: Callable[..., Any] = getattr(import_module(_ROOMS[processor_type]), class_type)
    return made


class Maker:
    """Turns the arguments of calls into what our classes take."""

    def __init__(self, folder: Path, object_store: str, make_room: Callable[[int], None]) -> None:
        """Make nothing yet.

        Args:
            folder: Where files are put.
            object_store: Where they come from.
            make_room: Called with the bytes of a file before it is put there; refuses what does not fit.
        """
        self._folder = folder
        self._make_room = make_room
        self._object_store = object_store
        self._metas: dict[str, Any] = {}
        self.files: set[str] = set()
        """Those that it has made something of."""

    def arguments(self, arguments: Mapping[str, Any], sources: Sources, found: Callable[[str], Any]) -> dict[str, Any]:
        """The arguments of one call; ``found`` is asked for other processors.

        Raises:
            InvalidInput: One of them names what is not to be had.
        """
        made: dict[str, Any] = {}
        for name, value in arguments.items():
            if name == FIELD:
                made[name] = None if value is None else self._meta(value, sources)
            elif name == "model_id":
                made[name] = _model(value, sources)
            elif name in REFERENCES and is_processor_id(value):
                made[name] = found(value)
            elif name in REFERENCES:
                made[name] = _component(name, value)
            else:
                made[name] = value
        for name in _BOUNDED:
            if isinstance(made.get(name), int) and made[name] > MAX_BATCH_ROWS:
                raise InvalidInput(name, f"is {made[name]}; at most {MAX_BATCH_ROWS} rows are taken at once")
        return made

    def _meta(self, value: Any, sources: Sources) -> Any:
        """The same description is the same object: rows in memory are known again by that alone."""
        key = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        if key not in self._metas:
            rows = read_dataset_meta(value)
            self._metas[key] = import_module("twinkle.dataset").DatasetMeta(
                dataset_id=self._place(rows, sources),
                subset_name=rows.subset_name,
                split=rows.split,
                data_slice=rows.data_slice,
                data=rows.data,
            )
        return self._metas[key]

    def _place(self, rows: RowsOf, sources: Sources) -> str:
        if rows.file_id is not None:
            if rows.file_id not in sources.files:
                raise InvalidInput(FIELD, f"there is no file {rows.file_id} (any more)")
            return str(self._fetched(rows.file_id, sources.files[rows.file_id]))
        if rows.path is not None:
            return _opened(rows.path, sources.folders)
        return rows.dataset_id

    def _fetched(self, file_id: str, source: FileSource) -> Path:
        """The file on this machine, under its own name."""
        self.files.add(file_id)
        size_bytes = sum(piece.size_bytes for piece in source.pieces)
        if size_bytes > MAX_SOURCE_BYTES:
            raise TooLarge(f"{file_id} has {size_bytes} bytes; a data set is made of at most {MAX_SOURCE_BYTES}")
        place = self._folder / file_id / (os.path.basename(source.name) or "rows.jsonl")
        if place.is_file() and place.stat().st_size == size_bytes:
            return place
        self._make_room(size_bytes)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.partial")
        with partial.open("wb") as file:
            for stretch in stretches_of(open_blob_store(self._object_store), source.pieces):
                file.write(stretch)
        partial.rename(place)
        return place


def _opened(path: str, folders: tuple[str, ...]) -> str:
    """A path in a folder that the operator has opened, links followed."""
    place = place_in(os.path.expanduser(path), folders)
    if place is not None and place[1] != os.curdir:
        return os.path.join(*place)
    raise InvalidInput(
        FIELD, "names a path of the server, which is not open to clients; upload the file and send its id"
    )


def _model(value: Any, sources: Sources) -> str:
    if not isinstance(value, str):
        raise InvalidInput("model_id", "must be the name of a served model, or the id of a model of a hub")
    served = sources.models.get(plain_model_name(value))
    if served is not None:
        return served
    if not is_hub_id(value):
        raise InvalidInput("model_id", f"{value[:200]!r} is neither served here nor the id of a model of a hub")
    return value


def _component(name: str, value: Any) -> str:
    """A name of ours, or the id of a plugin, which runs only where the operator has approved it with its revision."""
    if not isinstance(value, str) or (_PLUGIN in value and not is_hub_id(value.partition("#")[0])):
        raise InvalidInput(name, "must be a name of ours, the id of a plugin that the operator approved, or a pid")
    require_approved(name, value)
    return value
