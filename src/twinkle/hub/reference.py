"""What a script's id of a model, a data set or a plugin stands for, before anything is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import HUB_NAMES, HUGGING_FACE, HubSettings

SEPARATOR = "://"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)
PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A repository of a hub, or a place in the file system.

    Args:
        text: As the script said it, for messages.
        place: The file or folder, if it is one of this machine; then the rest says nothing.
        hub: ``ms`` or ``hf``; None: of whichever has it.
        repository: ``org/name``.
        revision: A branch, tag or commit; None: the hub's newest.
    """

    text: str
    place: Path | None = None
    hub: str | None = None
    repository: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        if self.place is not None:
            return str(self.place)
        return (f"{self.hub}{SEPARATOR}" if self.hub else "") + pinned(self.repository, self.revision)


def pinned(repository: str, revision: str | None) -> str:
    """How a repository at a revision is written."""
    return f"{repository}@{revision}" if revision else repository


def without_scheme(text: str) -> str:
    """What follows the last ``://``."""
    return text.rpartition(SEPARATOR)[2]


def names_repository(text: str) -> bool:
    """Whether a text that is no folder here can only mean a repository: it has a hub's scheme, or is like ``org/name``
    and does not begin with a folder that is here."""
    if scheme_of(text) is not None:
        return True
    repository = text.partition("@")[0]
    begins_here = Path(repository.partition("/")[0]).exists()
    return "/" in repository and REPOSITORY.fullmatch(repository) is not None and not begins_here


def scheme_of(text: str) -> str | None:
    """The scheme before the last ``://``; None where there is none."""
    before, separator, _ = text.rpartition(SEPARATOR)
    return before.rpartition(SEPARATOR)[2] if separator else None


def parse_reference(
    text: str, settings: HubSettings, *, revision: str | None = None, field: str = "model_id"
) -> Reference:
    """Read an id: ``ms://org/name``, ``hf://org/name``, ``org/name``, each with ``@revision`` if wanted, or a path.

    What follows the last ``://`` is looked for in the file system first, whatever the scheme. An alias of the settings
    is put in its place once.

    Raises:
        ConfigError: It is none of these, or two revisions are named.
    """
    meant = settings.aliases.get(text) or settings.aliases.get(without_scheme(text)) or text
    scheme, rest = scheme_of(meant), without_scheme(meant)
    if not rest:
        raise ConfigError(f"{field}: is empty; send a folder, ms://org/name, hf://org/name or org/name")
    place = Path(rest).expanduser()
    if place.exists():
        return Reference(text=text, place=place)
    if rest.startswith(PATH_STARTS):
        raise ConfigError(f"{field}: {text}: no such folder{' or file' if field == 'dataset_id' else ''}")
    if scheme is not None and scheme not in HUB_NAMES:
        raise ConfigError(
            f"{field}: {text} is not a local folder, and there is no hub for {scheme}://; use ms:// or hf://"
        )
    if scheme == HUGGING_FACE and HUGGING_FACE not in settings.hubs:
        raise ConfigError(f"{field}: {text}: Hugging Face is not among TWINKLE_HUBS ({', '.join(settings.hubs)})")
    repository, _, pin = rest.partition("@")
    if pin and revision and pin != revision:
        raise ConfigError(f"{field}: {text} names another revision than revision={revision!r}; name one")
    revision = revision or pin or None
    is_repository = REPOSITORY.fullmatch(repository) is not None and ".." not in repository
    if not is_repository or (revision is not None and not _is_revision(revision)):
        raise ConfigError(f"{field}: {text} is neither a local folder nor an id like org/name")
    return Reference(text=text, hub=scheme, repository=repository, revision=revision)


def _is_revision(text: str) -> bool:
    return REVISION.fullmatch(text) is not None and ".." not in text
