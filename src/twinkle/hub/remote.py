"""What is asked of a hub over the network, whichever it is, and what it may answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twinkle.core.errors import ConfigError
from twinkle.hub.caches import Kind


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
