"""Whose code may run here: that of ids which the operator has named with a revision, and of folders so named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import HubSettings
from twinkle.core.process.events import event_log
from twinkle.core.process.trust import TRUST_VARIABLE
from twinkle.hub.model_path import Found, locate, resolve_model_id
from twinkle.hub.reference import parse_reference, pinned, without_scheme

MOVING = frozenset({"main", "master", "head", "latest"})
"""Names of revisions that stand for other code tomorrow."""
CODE_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files whose ``auto_map`` names code of a model."""

_log = event_log()


def require_trust(what: str, text: str, settings: HubSettings, *, revision: str | None = None) -> None:
    """Refuse code that the operator has not named: before anything of it is downloaded.

    Args:
        what: What the code is, for the message: ``plugin``.
        text: Its id, or its folder.
        settings: Whom the operator trusts.
        revision: Which of the repository, if the id names none.

    Raises:
        ConfigError: It is not named, or with no revision, or with one that moves.
    """
    reference = parse_reference(text, settings, revision=revision, field=what)
    if reference.place is not None:
        places = {Path(without_scheme(entry)).expanduser().absolute() for entry in settings.trusted}
        if reference.place.absolute() not in places:
            raise _refusal(what, text, str(reference.place.absolute()))
        return
    wanted = pinned(reference.repository, reference.revision)
    if reference.revision is None or reference.revision.lower() in MOVING:
        raise ConfigError(
            f"{what}: {text} names no revision that stays what it is; name a commit or a tag, like"
            f" {pinned(reference.text, 'v1.0')}, here and in {TRUST_VARIABLE}"
        )
    # An entry that leaves the hub open covers both; an id that does is covered by no other.
    forms = {wanted, str(reference)}
    if forms.isdisjoint(settings.trusted):
        raise _refusal(what, text, str(reference))


def locate_trusted(what: str, text: str, *, revision: str | None = None) -> Found:
    """The folder of code that the operator trusts, downloaded if no cache has it.

    Raises:
        ConfigError: It is not trusted, or nowhere.
    """
    settings = HubSettings.read()
    require_trust(what, text, settings, revision=revision)
    return locate(text, revision=revision, field=what, settings=settings)


def is_trusted(text: str, *, revision: str | None = None) -> bool:
    """Whether the operator has named an id, or a folder."""
    try:
        require_trust("model_id", text, HubSettings.read(), revision=revision)
    except ConfigError:
        return False
    return True


def open_model(model_id: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The folder of a model, and what a script's arguments for transformers leave to say to it.

    ``revision`` and ``token`` are said to the hub. ``trust_remote_code`` is for the operator to say, and is put right.

    Raises:
        ConfigError: It is nowhere, or needs code of a repository that is not trusted.
    """
    left = dict(settings)
    revision, token = left.pop("revision", None), left.pop("token", None)
    left.pop("trust_remote_code", None)
    folder = Path(resolve_model_id(model_id, revision=revision, token=token))
    # Never left out: transformers would ask on the terminal.
    left["trust_remote_code"] = check_model_code(model_id, folder, revision=revision)
    return str(folder), left


@contextmanager
def naming_code(text: str) -> Iterator[None]:
    """Let transformers read what may bring no code; where it needs some, the refusal names what it is of.

    Raises:
        ConfigError: Nothing of transformers' own reads it.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"{text} names code of its own (auto_map), which would have to run to read it and is not run; take a model"
            f" that transformers reads by itself. In scripts the operator may trust it: see {TRUST_VARIABLE}"
        ) from error


def check_model_code(text: str, folder: Path, *, revision: str | None = None) -> bool:
    """Whether a model is to be loaded with code of its own: it brings some, and the operator trusts it.

    Raises:
        ConfigError: What it brings lies in a repository of somebody else's, which is not trusted.
    """
    settings = HubSettings.read()
    named = list(_code_of(folder))
    if not named:
        return False
    if not is_trusted(text, revision=revision):
        _log.warning("model.code_not_run", id=text, next=f"transformers' own class is taken; see {TRUST_VARIABLE}")
        return False
    for name in named:
        repository, separator, _ = name.partition("--")
        if separator:
            require_trust("auto_map", repository, settings)
    return True


def _code_of(folder: Path) -> Iterator[str]:
    for name in CODE_CONFIGS:
        file = folder / name
        if file.is_file():
            written = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(written, Mapping):
                yield from _texts(written.get("auto_map") or {})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _refusal(what: str, text: str, entry: str) -> ConfigError:
    return ConfigError(
        f"{what}: {text} is code, and runs only when the operator says so: read it, then set {TRUST_VARIABLE}={entry}"
        " (several are separated by commas)"
    )
