"""Hugging Face's hub, through ``huggingface_hub``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

# That of httpx, or of httpx2 since version 2.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

from twinkle.hub.caches import Kind, hugging_face_cache
from twinkle.hub.remote import NotThere, Unanswered, Upload

Result = TypeVar("Result")


class HuggingFace:
    """See :class:`twinkle.hub.remote.Remote`."""

    @property
    def endpoint(self) -> str:
        return str(self._api(None).endpoint)

    def download(
        self, repository: str, kind: Kind, revision: str | None, *, ignored: Sequence[str], token: str | None
    ) -> Path:
        folder = _asked(
            repository,
            lambda: self._api(token).snapshot_download(
                repository,
                repo_type=kind,
                revision=revision,
                cache_dir=hugging_face_cache(),
                ignore_patterns=list(ignored) or None,
            ),
        )
        return Path(str(folder))

    def download_file(self, repository: str, kind: Kind, name: str, revision: str | None, *, token: str | None) -> Path:
        file = _asked(
            repository,
            lambda: self._api(token).hf_hub_download(
                repository, name, repo_type=kind, revision=revision, cache_dir=hugging_face_cache()
            ),
        )
        return Path(str(file))

    def login(self, token: str | None) -> bool:
        api = self._api(token)
        if api.token is None and not os.environ.get("HF_TOKEN"):
            return False
        try:
            api.whoami()
        except (HfHubHTTPError, TransportError):
            return False
        return True

    def create(self, repository: str, *, private: bool, token: str | None) -> None:
        _asked(repository, lambda: self._api(token).create_repo(repository, private=private, exist_ok=True))

    def upload(self, repository: str, upload: Upload, *, token: str | None) -> str:
        commit = _asked(
            repository,
            lambda: self._api(token).upload_folder(
                repo_id=repository,
                folder_path=upload.folder,
                path_in_repo=upload.path_in_repo or None,
                commit_message=upload.message,
                commit_description=upload.description,
                revision=upload.revision,
                ignore_patterns=list(upload.ignored) or None,
            ),
        )
        return str(commit.commit_url)

    def _api(self, token: str | None) -> HfApi:
        # The library reads the variable once, at its import.
        return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)


def _asked(repository: str, call: Callable[[], Result]) -> Result:
    """The answer of the hub, its errors in our words."""
    try:
        return call()
    except (HfHubHTTPError, LocalEntryNotFoundError, TransportError, OSError) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        reason = lines[0] if lines else type(cause).__name__
        kind = NotThere if isinstance(cause, HfHubHTTPError) and _is_a_no(cause) else Unanswered
        raise kind(f"Hugging Face gives no {repository}: {reason}") from error


def _is_a_no(error: HfHubHTTPError) -> bool:
    """Whether the hub has answered, and answered that it has (or shows) no such thing."""
    return error.response is not None and 400 <= error.response.status_code < 500
