"""The one door through which every id of a model, a data set or a plugin becomes a folder of this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import HUB_NAMES, HUGGING_FACE, HubSettings
from twinkle.core.process.events import event_log
from twinkle.hub.caches import (
    Kind,
    find_cached,
    find_only_revision,
    has_all_weights,
    hugging_face_cache,
    hugging_face_is_offline,
    modelscope_cache,
)
from twinkle.hub.reach import reachable_remote
from twinkle.hub.reference import Reference, parse_reference, pinned
from twinkle.hub.remote import NotThere, Unanswered

WEIGHT_FILES = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.ckpt", "*.onnx", "*.msgpack"),
    *("*.zip", "*.tar", "*.gz"),
)
"""What is left out where the weights are not wanted: a tokenizer needs none of it."""

_log = event_log()


@dataclass(frozen=True, kw_only=True)
class Found:
    """A folder, and the hub it came from; none for a place in the file system."""

    path: Path
    hub: str | None = None
    repository: str = ""
    revision: str | None = None


def resolve_model_id(
    model_id: str,
    *,
    revision: str | None = None,
    ignore_model: bool = False,
    token: str | None = None,
    field: str = "model_id",
) -> str:
    """The local folder of a model: a path, ``ms://org/name``, ``hf://org/name`` or ``org/name``, with ``@revision``.

    What follows the last ``://`` is looked for in the file system first, then in the hubs' caches, then on the hubs.

    Args:
        model_id: What a script, a flag or a setting says.
        revision: A branch, tag or commit, if the id names none.
        ignore_model: Whether everything but the weights will do.
        token: For a hub; default: as its own library finds one.
        field: The name of the argument, for errors.

    Raises:
        ConfigError: It is nowhere; the message says where it was looked for, and why it was not there.
    """
    found = locate(
        model_id,
        revision=revision,
        with_weights=not ignore_model,
        ignored=WEIGHT_FILES if ignore_model else (),
        token=token,
        field=field,
    )
    return str(found.path)


def locate(
    text: str,
    *,
    kind: Kind = "model",
    hub: str | None = None,
    revision: str | None = None,
    with_weights: bool = False,
    ignored: Sequence[str] = (),
    token: str | None = None,
    field: str = "model_id",
    settings: HubSettings | None = None,
) -> Found:
    """Where a repository lies, after a download if it has to be.

    Args:
        text: The id.
        kind: What the repository holds.
        hub: The hub of an id that names none; default: those of the settings, in their order.
        revision: A branch, tag or commit, if the id names none.
        with_weights: Whether a folder that lacks weights of a model will not do.
        ignored: Files not to download.
        token: For a hub.
        field: The name of the argument, for errors.
        settings: Default: the environment's.

    Raises:
        ConfigError: It is nowhere.
    """
    settings = HubSettings.read() if settings is None else settings
    reference = parse_reference(text, settings, revision=revision, field=field)
    if reference.place is not None:
        return Found(path=reference.place)
    named = reference.hub or hub
    hubs = (named,) if named else settings.hubs
    found, reasons = cached(reference, hubs, kind=kind, with_weights=with_weights)
    if found is None:
        found = _download(reference, hubs, reasons, settings, kind, with_weights, ignored, token)
    if found is None and reference.revision is None:
        found = _whatever_lies_there(reference, hubs, kind, with_weights)
    if found is None:
        raise ConfigError(f"{field}: {text} is no folder here, and was not found: {'; '.join(reasons)}")
    return found


def locate_file(
    text: str,
    name: str,
    *,
    kind: Kind = "model",
    hub: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    field: str = "repo_id",
) -> Path:
    """One file of a repository: of a folder, of a cache, else of a hub.

    Raises:
        ConfigError: It is nowhere; ``Unanswered`` where a hub may have it that could not be asked.
    """
    settings = HubSettings.read()
    reference = parse_reference(text, settings, revision=revision, field=field)
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise ConfigError(f"file_name: {name} is not below {text}")
    if reference.place is not None:
        if not (reference.place / name).is_file():
            raise ConfigError(f"{field}: {reference.place} has no {name}")
        return reference.place / name
    named = reference.hub or hub
    hubs = (named,) if named else settings.hubs
    for asked in hubs:
        folder = find_cached(asked, reference.repository, kind, reference.revision)
        if folder is not None and (folder / name).is_file():
            return folder / name
    reasons: list[NotThere] = []
    for asked in hubs:
        if is_offline(asked, settings):
            reasons.append(Unanswered(f"{HUB_NAMES[asked]}'s cache has it not, and the hub is not asked (offline)"))
            continue
        try:
            remote = reachable_remote(asked, reference.repository)
            return remote.download_file(reference.repository, kind, name, reference.revision, token=token)
        except NotThere as error:
            reasons.append(error)
    kind_of_error = Unanswered if any(isinstance(reason, Unanswered) for reason in reasons) else ConfigError
    raise kind_of_error(f"{field}: {text}: {name} was not found: {'; '.join(map(str, reasons))}")


def cached(
    reference: Reference, hubs: Sequence[str], *, kind: Kind, with_weights: bool
) -> tuple[Found | None, list[str]]:
    """What the caches hold of a repository, the first of the hubs that has it; else why each has not."""
    reasons = []
    for hub in hubs:
        folder = find_cached(hub, reference.repository, kind, reference.revision)
        if folder is None:
            reasons.append(f"{HUB_NAMES[hub]}'s cache ({_cache(hub)}) has no {_wanted(reference)}")
        elif _mark(hub, kind, reference).exists():
            reasons.append(f"a download of it to {folder} broke off")
        elif with_weights and not has_all_weights(folder):
            reasons.append(f"{folder} lacks weights")
        else:
            _say(reference, hub, "cache", folder)
            return _found(folder, hub, reference), reasons
    return None, reasons


def is_offline(hub: str, settings: HubSettings) -> bool:
    """Whether a hub must not be asked."""
    return settings.offline or (hub == HUGGING_FACE and hugging_face_is_offline())


def _download(
    reference: Reference,
    hubs: Sequence[str],
    reasons: list[str],
    settings: HubSettings,
    kind: Kind,
    with_weights: bool,
    ignored: Sequence[str],
    token: str | None,
) -> Found | None:
    for hub in hubs:
        if is_offline(hub, settings):
            reasons.append(f"{HUB_NAMES[hub]} is not asked (offline)")
            continue
        try:
            remote = reachable_remote(hub, reference.repository)
            with _turn(hub, kind, reference):
                # Another process may have brought it meanwhile.
                found, _ = cached(reference, (hub,), kind=kind, with_weights=with_weights)
                if found is not None:
                    return found
                _log.info("hub.download", id=reference.text, hub=HUB_NAMES[hub], folder=str(_cache(hub)))
                with _marked_unfinished(hub, kind, reference):
                    folder = remote.download(
                        reference.repository, kind, reference.revision, ignored=ignored, token=token
                    )
        except NotThere as error:
            reasons.append(error.message)
            continue
        _say(reference, hub, "network", folder)
        return _found(folder, hub, reference)
    return None


def _whatever_lies_there(reference: Reference, hubs: Sequence[str], kind: Kind, with_weights: bool) -> Found | None:
    """The one revision in a cache of a repository whose newest nobody here knows, where no hub has told."""
    for hub in hubs:
        if find_cached(hub, reference.repository, kind, None) is not None or _mark(hub, kind, reference).exists():
            continue
        folder = find_only_revision(hub, reference.repository, kind)
        if folder is not None and (not with_weights or has_all_weights(folder)):
            _log.warning("hub.revision_assumed", id=reference.text, revision=folder.name, next="name it to be sure")
            return _found(folder, hub, reference)
    return None


@contextmanager
def _turn(hub: str, kind: Kind, reference: Reference) -> Iterator[None]:
    """One process at a time downloads a repository."""
    # It comes with both hubs' libraries.
    from filelock import FileLock  # noqa: PLC0415

    lock = _mark(hub, kind, reference).with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield


@contextmanager
def _marked_unfinished(hub: str, kind: Kind, reference: Reference) -> Iterator[None]:
    """A download that breaks off leaves a mark, unless it has left nothing: half a folder looks like a whole one."""
    mark = _mark(hub, kind, reference)
    mark.touch()
    try:
        yield
    except NotThere:
        if find_cached(hub, reference.repository, kind, reference.revision) is None:
            mark.unlink()
        raise
    mark.unlink()


def _mark(hub: str, kind: Kind, reference: Reference) -> Path:
    name = f"{kind}/{pinned(reference.repository, reference.revision)}"
    return _cache(hub) / ".twinkle" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.unfinished"


def _cache(hub: str) -> Path:
    return hugging_face_cache() if hub == HUGGING_FACE else modelscope_cache()


def _wanted(reference: Reference) -> str:
    return pinned(reference.repository, reference.revision)


def _found(folder: Path, hub: str, reference: Reference) -> Found:
    return Found(path=folder, hub=hub, repository=reference.repository, revision=reference.revision)


def _say(reference: Reference, hub: str, source: str, folder: Path) -> None:
    _log.info("hub.taken", id=reference.text, hub=HUB_NAMES[hub], source=source, folder=str(folder))
