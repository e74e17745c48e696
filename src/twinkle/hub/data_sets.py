"""Data sets of hubs, folders and files, as ``datasets`` has them. Code that lies beside the data never runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets.exceptions import DatasetsError
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.cache.cache import Cache

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.hub_settings import HUB_NAMES, HUGGING_FACE, HubSettings
from twinkle.core.process.events import event_log
from twinkle.hub.caches import find_cached, hugging_face_home, missing_shards, modelscope_cache
from twinkle.hub.model_path import cached, is_offline, locate
from twinkle.hub.reference import Reference, parse_reference

DEFAULT_SUBSET = "default"
READERS: Mapping[str, str] = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Which of its readers ``datasets`` has for a file, by the end of its name."""

DataSet: TypeAlias = datasets.Dataset | datasets.IterableDataset

_log = event_log()


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which rows of a repository are wanted, and how."""

    subset: str = DEFAULT_SUBSET
    split: str = "train"
    streaming: bool = False
    num_proc: int | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments that every reader takes."""
        how: dict[str, Any] = {"split": self.split, "streaming": self.streaming}
        return how if self.streaming or self.num_proc is None else how | {"num_proc": self.num_proc}


def load(text: str, part: Part, *, hub: str | None, revision: str | None, token: str | None) -> DataSet:
    """The rows of a data set: a file, a folder, or a repository of a hub; a cache is looked at before the network.

    Raises:
        ConfigError: There is no such data set, subset or split; the message names those there are.
    """
    settings = HubSettings.read()
    reference = parse_reference(text, settings, revision=revision, field="dataset_id")
    if reference.place is not None:
        return read_place(reference.place, part)
    named = reference.hub or hub
    hubs = (named,) if named else settings.hubs
    prepared = _prepared(reference, hubs, part)
    if prepared is not None:
        return prepared
    may_be_asked = hubs[0] == HUGGING_FACE and not is_offline(HUGGING_FACE, settings)
    found, _ = cached(reference, hubs, kind="dataset", with_weights=False)
    if found is not None:
        try:
            return read_place(found.path, part)
        except ConfigError:
            # Its library keeps the files of the subsets that were asked for, in a folder like that of the whole.
            if found.hub != HUGGING_FACE or not may_be_asked:
                raise
    if may_be_asked:
        # It reads the files of one subset alone, or streams them: a repository may hold terabytes.
        return _of_hugging_face(reference, part, token)
    found = locate(text, kind="dataset", hub=hub, revision=revision, token=token, field="dataset_id")
    return read_place(found.path, part)


def read_place(place: Path, part: Part) -> DataSet:
    """The rows of a file or of a folder of files.

    Raises:
        ConfigError: It is of no kind that can be read, or has no such subset or split.
    """
    if place.is_file():
        reader = READERS.get(place.suffix.lower())
        if reader is None:
            raise ConfigError(f"dataset_id: {place} is none of {', '.join(READERS)}")
        options = {"delimiter": "\t"} if place.suffix.lower() == ".tsv" else {}
        files = {part.split.partition("[")[0]: str(place)}
        return _read(reader, part, data_files=files, **options)
    missing = missing_shards(place)
    if missing is not None:
        raise ConfigError(f"dataset_id: {place} is not whole: it lacks {missing}")
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        return _saved(place, part)
    arguments = {"data_dir": part.subset} if _is_folder_of_rows(place, part.subset) else _subset(place, part.subset)
    return _read(str(place), part, **arguments)


def _read(path: str, part: Part, **arguments: Any) -> DataSet:
    try:
        return _checked(datasets.load_dataset(path, **arguments, **part.reading))
    except (ValueError, FileNotFoundError, DatasetsError) as error:
        place = next(iter(arguments.get("data_files", {"": path}).values()))
        raise ConfigError(f"dataset_id: {place}, subset {part.subset!r}, split {part.split!r}: {error}") from error


def _subset(place: Path, subset: str) -> dict[str, str]:
    """``name=`` where the data set's card lists subsets; the only one there is stands for ``default``."""
    names = _subsets(place)
    if subset in names:
        return {"name": subset}
    if subset == DEFAULT_SUBSET and len(names) == 1:
        return {"name": names[0]}
    raise ConfigError(f"dataset_id: {place} has no subset {subset!r}; it has {', '.join(names)}")


def _is_folder_of_rows(place: Path, subset: str) -> bool:
    """Whether the subset is a folder, of a repository whose card says nothing of subsets."""
    folder = place / subset
    return folder.is_dir() and _subsets(place) == [DEFAULT_SUBSET]


def _subsets(place: Path) -> list[str]:
    try:
        return list(datasets.get_dataset_config_names(str(place)))
    except (FileNotFoundError, DatasetsError) as error:
        code = sorted(file.name for file in place.glob("*.py"))
        why = f"; code beside the data does not run ({', '.join(code)})" if code else ""
        raise ConfigError(f"dataset_id: {place} holds no data that can be read: {error}{why}") from error


def _saved(place: Path, part: Part) -> DataSet:
    """What ``save_to_disk`` has written."""
    saved = datasets.load_from_disk(str(place))
    if isinstance(saved, datasets.DatasetDict):
        if part.split not in saved:
            raise ConfigError(f"dataset_id: {place} has no split {part.split!r}; it has {', '.join(saved)}")
        saved = saved[part.split]
    return _checked(saved.to_iterable_dataset() if part.streaming else saved)


def _prepared(reference: Reference, hubs: tuple[str, ...], part: Part) -> DataSet | None:
    """What ``datasets``, or ModelScope's form of it, has made of a repository on this machine before."""
    for hub in hubs:
        for cache in _prepared_caches(hub):
            builder = _builder(cache, reference, part)
            if builder is None or not _is_at(builder, hub, reference):
                continue
            builder.download_and_prepare()
            _log.info("hub.taken", id=reference.text, hub=HUB_NAMES[hub], source="cache", folder=str(builder.cache_dir))
            if part.streaming:
                return _checked(builder.as_streaming_dataset(split=part.split))
            return _checked(builder.as_dataset(split=part.split))
    return None


def _prepared_caches(hub: str) -> tuple[Path, ...]:
    if hub == HUGGING_FACE:
        return (Path(datasets.config.HF_DATASETS_CACHE), hugging_face_home() / "datasets")
    return (modelscope_cache() / "datasets", modelscope_cache() / "hub" / "datasets")


def _builder(cache: Path, reference: Reference, part: Part) -> Cache | None:
    """The newest that was made of a subset and holds the split; one that is broken off has no record of itself."""
    *namespace, name = reference.repository.split("/")
    folder = cache / "___".join([*namespace, camelcase_to_snakecase(name)])
    records = sorted(folder.glob("*/*/*/dataset_info.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    infos = [(file.parent, json.loads(file.read_text())) for file in records]
    subsets = {info.get("config_name") for _, info in infos}
    subset = next(iter(subsets)) if part.subset == DEFAULT_SUBSET and len(subsets) == 1 else part.subset
    for place, info in infos:
        if info.get("config_name") == subset and part.split.partition("[")[0] in (info.get("splits") or {}):
            return Cache(
                cache_dir=str(cache),
                dataset_name=name,
                repo_id=reference.repository,
                config_name=place.parts[-3],
                version=place.parts[-2],
                hash=place.parts[-1],
            )
    return None


def _is_at(builder: Cache, hub: str, reference: Reference) -> bool:
    """Whether rows were made of the revision that is wanted: their folder is called like its commit."""
    if reference.revision is None:
        return True
    snapshot = find_cached(hub, reference.repository, "dataset", reference.revision)
    commit = snapshot.name if snapshot is not None else reference.revision
    return bool(builder.hash == commit)


def _of_hugging_face(reference: Reference, part: Part, token: str | None) -> DataSet:
    try:
        names = datasets.get_dataset_config_names(reference.repository, revision=reference.revision, token=token)
    except DatasetsError as error:
        raise ConfigError(f"dataset_id: {reference.text} is not to be had of Hugging Face: {error}") from error
    subset = names[0] if part.subset == DEFAULT_SUBSET and len(names) == 1 else part.subset
    if subset not in names:
        raise ConfigError(f"dataset_id: {reference} has no subset {part.subset!r}; it has {', '.join(names)}")
    _log.info("hub.taken", id=reference.text, hub=HUB_NAMES[HUGGING_FACE], source="network", folder=None)
    return _read(reference.repository, part, name=subset, revision=reference.revision, token=token)


def _checked(rows: Any) -> DataSet:
    if isinstance(rows, (datasets.Dataset, datasets.IterableDataset)):
        return rows
    raise InvalidInput("split", "stands for several; name one")
