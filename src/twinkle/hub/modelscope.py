"""ModelScope's hub, through ``modelscope_hub``, which comes with ``modelscope``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import requests
from modelscope_hub import HubApi
from modelscope_hub.config import HubConfig
from modelscope_hub.constants import Visibility
from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError

from twinkle.core.errors import ConfigError
from twinkle.hub.caches import Kind, modelscope_cache
from twinkle.hub.remote import NotThere, Unanswered, Upload

MAIN_BRANCH = "master"

Result = TypeVar("Result")


class ModelScope:
    """See :class:`twinkle.hub.remote.Remote`."""

    @property
    def endpoint(self) -> str:
        return str(_api(None)._config.endpoint)

    def download(
        self, repository: str, kind: Kind, revision: str | None, *, ignored: Sequence[str], token: str | None
    ) -> Path:
        folder = _asked(
            repository,
            lambda: _api(token).download_repo(
                repository, kind, revision=_branch(revision), ignore_patterns=list(ignored) or None
            ),
        )
        return Path(str(folder))

    def download_file(self, repository: str, kind: Kind, name: str, revision: str | None, *, token: str | None) -> Path:
        file = _asked(repository, lambda: _api(token).download_file(repository, kind, name, revision=_branch(revision)))
        return Path(str(file))

    def login(self, token: str | None) -> bool:
        api = _api(token)
        if not api._config.token:
            return False
        try:
            api.whoami()
        except (HubError, requests.RequestException):
            return False
        return True

    def create(self, repository: str, *, private: bool, token: str | None) -> None:
        api = _api(token)
        if _asked(repository, lambda: api.repo_exists(repository, "model")):
            return
        visibility = Visibility.PRIVATE if private else Visibility.PUBLIC
        _asked(repository, lambda: api.create_repo(repository, "model", visibility=visibility))

    def upload(self, repository: str, upload: Upload, *, token: str | None) -> str:
        api = _api(token)
        _asked(
            repository,
            lambda: api.upload_folder(
                repository,
                "model",
                upload.folder,
                path_in_repo=upload.path_in_repo,
                commit_message=upload.message,
                commit_description=upload.description or None,
                revision=_branch(upload.revision),
                ignore_patterns=list(upload.ignored) or None,
                use_cache=False,
                disable_tqdm=True,
            ),
        )
        return f"{api._config.endpoint}/models/{repository}"


def _api(token: str | None) -> HubApi:
    return HubApi(HubConfig(cache_dir=modelscope_cache(), token=token))


def _branch(revision: str | None) -> str:
    return MAIN_BRANCH if revision in (None, "main") else str(revision)


def _asked(repository: str, call: Callable[[], Result]) -> Result:
    """The answer of the hub, its errors in our words."""
    try:
        return call()
    except (AuthenticationError, PermissionDeniedError) as error:
        raise ConfigError(
            f"ModelScope refuses {repository} ({_first_line(error)}); set MODELSCOPE_API_TOKEN to a token that may"
        ) from error
    except NotExistError as error:
        raise NotThere(f"ModelScope has no {repository}: {_first_line(error)}") from error
    except (HubError, requests.RequestException, OSError) as error:
        raise Unanswered(f"ModelScope gives no {repository}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
