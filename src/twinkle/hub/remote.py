"""What is asked of a hub over the network, whichever it is."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import HUB_NAMES, HUGGING_FACE, MODELSCOPE
from twinkle.hub.caches import Kind

_REACH_S = 5.0
_PORTS = {"http": 80, "https": 443}
PACKAGES = {"ms": "modelscope_hub", "hf": "huggingface_hub"}


class NotThere(ConfigError):
    """A hub could not be asked, or does not have (or show) what it was asked for."""


class Unanswered(NotThere):
    """A hub was not asked, or did not answer: what it has is not known."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A folder on its way to a repository."""

    folder: Path
    path_in_repo: str
    message: str
    description: str
    revision: str | None
    ignored: Sequence[str]


class Remote(Protocol):
    """One hub, through its own library, with its own tokens."""

    @property
    def endpoint(self) -> str:
        """The URL of the hub, as its library finds it."""
        ...

    def download(
        self, repository: str, kind: Kind, revision: str | None, *, ignored: Sequence[str], token: str | None
    ) -> Path:
        """Bring a whole repository into the hub's cache; its folder. Blocks.

        Raises:
            NotThere: The hub does not answer, or has no such thing for this token.
        """
        ...

    def download_file(self, repository: str, kind: Kind, name: str, revision: str | None, *, token: str | None) -> Path:
        """Bring one file into the hub's cache. Blocks.

        Raises:
            NotThere: As above.
        """
        ...

    def login(self, token: str | None) -> bool:
        """Whether a token is at hand and the hub takes it."""
        ...

    def create(self, repository: str, *, private: bool, token: str | None) -> None:
        """Make a repository for a model, unless there is one already."""
        ...

    def upload(self, repository: str, upload: Upload, *, token: str | None) -> str:
        """Put a folder into a repository in one commit; the URL to look at. Blocks."""
        ...


def reachable_remote(hub: str, repository: str) -> Remote:
    """The client of a hub that may have a repository and is there to be asked.

    The hubs' libraries try for half a minute to reach one that is not.

    Raises:
        Unanswered: Its library is not installed, or nothing answers where it should be.
        NotThere: The hub has no ids like this one.
    """
    if hub == MODELSCOPE and "/" not in repository:
        raise NotThere(f"{HUB_NAMES[hub]}'s ids are owner/name")
    remote = remote_of(hub)
    place = urlsplit(remote.endpoint)
    # A proxy is asked to reach it; whether it does is for the library to find out.
    if place.hostname is not None and not (set(getproxies()) & {place.scheme, "all"}):
        try:
            socket.create_connection((place.hostname, place.port or _PORTS[place.scheme]), _REACH_S).close()
        except OSError as error:
            raise Unanswered(f"{HUB_NAMES[hub]} cannot be reached ({place.hostname}: {error})") from error
    return remote


def remote_of(hub: str) -> Remote:
    """The client of a hub.

    Raises:
        Unanswered: Its library is not installed.
    """
    if find_spec(PACKAGES[hub]) is None:
        raise Unanswered(f"{HUB_NAMES[hub]}'s library is not installed: pip install 'twinkle-queue[scripts]'")
    # Each brings its hub's library, which costs a second and is not needed where a cache has everything.
    if hub == HUGGING_FACE:
        from twinkle.hub.hugging_face import HuggingFace  # noqa: PLC0415

        return HuggingFace()
    from twinkle.hub.modelscope import ModelScope  # noqa: PLC0415

    return ModelScope()
