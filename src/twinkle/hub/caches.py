"""The hubs' own caches as they lie on the disk, read without their libraries and without any network."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import HUGGING_FACE, MODELSCOPE

Kind = Literal["model", "dataset"]

DEFAULT_BRANCHES = ("master", "main")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\..+)")
VERSION_FILE = ".mv"
"""What ModelScope's library up to 1.37 leaves beside a model: ``Revision:v1.0.0,CreatedAt:...``."""


def hugging_face_cache() -> Path:
    """Where ``huggingface_hub`` keeps repositories, by the same variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return _expanded(os.environ[name])
    return hugging_face_home() / "hub"


def hugging_face_home() -> Path:
    """The folder of ``HF_HOME``."""
    if os.environ.get("HF_HOME"):
        return _expanded(os.environ["HF_HOME"])
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def hugging_face_is_offline() -> bool:
    """Whether the user has told Hugging Face's libraries to stay off the network."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in {"1", "ON", "YES", "TRUE"}


def modelscope_cache() -> Path:
    """Where ``modelscope`` keeps repositories, by the same variable."""
    return _expanded(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope")


def find_cached(hub: str, repository: str, kind: Kind, revision: str | None) -> Path | None:
    """The folder of a repository in a hub's cache; None where it is not, or not at that revision."""
    if hub == HUGGING_FACE:
        return _of_hugging_face(repository, kind, revision)
    return _of_modelscope(repository, kind, revision)


def find_only_revision(hub: str, repository: str, kind: Kind) -> Path | None:
    """What the cache holds of a repository of which it does not know the newest, if that is one revision alone.

    Raises:
        ConfigError: There are several, and nothing says which is meant.
    """
    folder = _root(hub, repository, kind) / "snapshots"
    found = sorted(path for path in folder.iterdir() if _is_filled(path)) if folder.is_dir() else []
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:10])
        raise ConfigError(f"{repository}: the cache holds several revisions ({names}); name one: {repository}@REVISION")
    return found[0] if found else None


def has_all_weights(folder: Path) -> bool:
    """Whether a folder holds all the weights that its index names, or some where it has no index.

    A download that broke off, or one of the config and the tokenizer alone, has not. What has no config is no model and
    needs none.
    """
    if not (folder / "config.json").is_file():
        return True
    for name in INDEX_FILES:
        index = folder / name
        if index.is_file():
            shards = set(json.loads(index.read_text())["weight_map"].values())
            return all((folder / shard).is_file() for shard in shards)
    return any(file.suffix in WEIGHTS and file.is_file() for file in folder.iterdir())


def missing_shards(folder: Path) -> str | None:
    """What lacks of files that number themselves like ``train-00000-of-00005.parquet``; None where nothing does.

    A library that was stopped in the middle leaves the shards it had, in a folder like that of all.
    """
    found: dict[tuple[Path, str, int, str], set[int]] = {}
    for file in folder.rglob("*-of-*"):
        match = SHARD.fullmatch(file.name)
        if match is not None and file.is_file():
            key = (file.parent, match["stem"], int(match["total"]), match["suffix"])
            found.setdefault(key, set()).add(int(match["number"]))
    for (_, stem, total, suffix), numbers in found.items():
        if len(numbers) < total:
            return f"{total - len(numbers)} of the {total} files {stem}-*-of-*{suffix}"
    return None


def published_id(folder: str) -> str:
    """The id of a repository by its folder in a cache; the folder itself, where it lies in none.

    What is written into files that travel (an adapter's base model) names the repository, not this machine's cache.
    """
    path = Path(folder)
    for part in (path, *path.parents):
        if part.parent.name == "snapshots" and "--" in part.parent.parent.name:
            name = part.parent.parent.name.removeprefix("models--").removeprefix("datasets--")
            return name.replace("--", "/", 1)
    if path.is_absolute() and path.is_relative_to(modelscope_cache()):
        parts = [part for part in path.relative_to(modelscope_cache()).parts if part not in ("hub", "models")]
        if len(parts) == 2:
            return "/".join(parts).replace("___", ".")
    return folder


def _of_hugging_face(repository: str, kind: Kind, revision: str | None) -> Path | None:
    root = _root(HUGGING_FACE, repository, kind)
    reference = root / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = root / "snapshots" / (commit or "")
    return snapshot if commit and _is_filled(snapshot) else None


def _of_modelscope(repository: str, kind: Kind, revision: str | None) -> Path | None:
    if "/" not in repository:
        # No id of ModelScope's; what the library keeps of others would be taken for it.
        return None
    snapshots = _root(MODELSCOPE, repository, kind) / "snapshots"
    for branch in (revision,) if revision else DEFAULT_BRANCHES:
        if _is_filled(snapshots / branch):
            return snapshots / branch
    for folder in _older_folders(modelscope_cache(), repository, kind):
        if _is_filled(folder) and (revision is None or revision == _older_revision(folder)):
            return folder
    return None


def _root(hub: str, repository: str, kind: Kind) -> Path:
    name = repository.replace("/", "--")
    return hugging_face_cache() / f"{kind}s--{name}" if hub == HUGGING_FACE else modelscope_cache() / f"{kind}s" / name


def _older_folders(base: Path, repository: str, kind: Kind) -> Iterator[Path]:
    """Where ModelScope's library has kept repositories before 1.38; dots of a name were written as ``___``."""
    owner, _, name = repository.rpartition("/")
    for parent in (base / f"{kind}s", base / "hub" / f"{kind}s", base / "hub", base):
        for form in dict.fromkeys((name.replace(".", "___"), name)):
            yield parent / owner / form


def _older_revision(folder: Path) -> str:
    """The revision that was asked for then; the newest, where nothing says so."""
    version = folder / VERSION_FILE
    if not version.is_file():
        return DEFAULT_BRANCHES[0]
    return version.read_text().partition("Revision:")[2].partition(",")[0].strip()


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is not None


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser().absolute()
