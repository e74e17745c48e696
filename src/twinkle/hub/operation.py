"""What scripts ask of hubs: fetch a model or a data set, push a folder. Each id says which hub, as everywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import HUGGING_FACE, MODELSCOPE, HubSettings
from twinkle.core.process.events import event_log
from twinkle.hub.caches import Kind
from twinkle.hub.model_card import ModelCard, write_card
from twinkle.hub.model_path import WEIGHT_FILES, is_offline, locate, locate_file
from twinkle.hub.reach import remote_of
from twinkle.hub.reference import scheme_of, without_scheme
from twinkle.hub.remote import Remote, Upload

if TYPE_CHECKING:
    from twinkle.hub.data_sets import DataSet

Patterns = Sequence[str] | str | None

PRIVATE_FILES = (".git", ".git/*", "*/.git/*", ".env", "*.env", ".DS_Store", "__pycache__/*", "*/__pycache__/*")
"""What is never pushed, whatever lies in a folder."""

_log = event_log()


class Pushes:
    """Pushes that run beside the training, one after another: two at once would share the way out."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: dict[str, Future[str]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def start(self, repo_id: str, call: Future[str]) -> None:
        """Remember a push under its repository; a later one of the same takes its place."""
        with self._lock:
            self._running[repo_id] = call

    def threads(self) -> ThreadPoolExecutor:
        """The thread they run in. A process does not end before what it was given is done."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
            return self._threads

    def take(self, repo_ids: Sequence[str] | None) -> dict[str, Future[str]]:
        """Those of some repositories, or all; each is given once."""
        with self._lock:
            names = [name for name in self._running if repo_ids is None or name in repo_ids]
            return {name: self._running.pop(name) for name in names}


class HubOperation:
    """The operations, for ids of both hubs. An id without a scheme is looked for in the order of ``TWINKLE_HUBS``."""

    hub: ClassVar[str | None] = None
    """The hub of ids that name none."""

    _pushes: ClassVar[Pushes] = Pushes()

    @classmethod
    def source_type(cls, resource_name: str) -> str:
        """``ms`` or ``hf``: the hub that an id names, else the first that would be asked.

        Raises:
            ConfigError: It names another, or one that the settings leave out.
        """
        settings = HubSettings.read()
        scheme = scheme_of(resource_name or "") or cls.hub or settings.hubs[0]
        if scheme not in settings.hubs:
            raise ConfigError(f"{resource_name}: {scheme} is not among TWINKLE_HUBS ({', '.join(settings.hubs)})")
        return scheme

    @staticmethod
    def remove_source_type(resource_name: str) -> str:
        """What follows the last ``://`` of an id."""
        return without_scheme(resource_name or "")

    @classmethod
    def try_login(cls, token: str | None = None) -> bool:
        """Whether a hub takes a token: one given, with a scheme if wanted, else that of its library. Asks the hub."""
        remote = cls._remote(cls.source_type(token or ""))
        return remote.login(without_scheme(token or "") or None)

    @classmethod
    def create_model_repo(cls, repo_id: str, token: str | None = None, private: bool = True) -> str:
        """Make a repository for a model, private unless told otherwise; one that exists stays as it is. Its id."""
        hub, repository = cls._target(repo_id)
        cls._remote(hub).create(repository, private=private, token=token)
        return repository

    @classmethod
    def push_to_hub(
        cls,
        repo_id: str,
        folder_path: str | Path,
        path_in_repo: str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        token: str | None = None,
        private: bool = True,
        revision: str | None = None,
        ignore_patterns: Patterns = None,
        *,
        card: ModelCard | None = None,
    ) -> str:
        """Push a folder in one commit, making the repository first if there is none. Blocks; the URL to look at.

        Args:
            repo_id: ``ms://org/name`` or ``hf://org/name``.
            folder_path: What is pushed; a card is written into it, unless a ``README.md`` is there.
            path_in_repo: Where to put it. Default: the top.
            commit_message: In a line.
            commit_description: And at length.
            token: Default: as the hub's own library finds one.
            private: Whether a repository made now is hidden from others.
            revision: The branch. Default: the hub's.
            ignore_patterns: Files to leave out.
            card: What the card says of base, data and metrics.

        Raises:
            ConfigError: There is no such folder, or the hub refuses.
        """
        hub, repository = cls._target(repo_id)
        folder = Path(folder_path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"folder_path: {folder}: no such folder")
        if not path_in_repo:
            write_card(folder, repository, card or ModelCard())
        remote = cls._remote(hub)
        remote.create(repository, private=private, token=token)
        upload = Upload(
            folder=folder,
            path_in_repo=path_in_repo or "",
            message=commit_message or f"Upload {folder.name}",
            description=commit_description or "",
            revision=None if revision in ("main", "master") else revision,
            ignored=[*PRIVATE_FILES, *_listed(ignore_patterns)],
        )
        url = remote.upload(repository, upload, token=token)
        _log.info("hub.pushed", id=repo_id, folder=str(folder), url=url)
        return url

    @classmethod
    def async_push_to_hub(
        cls,
        repo_id: str,
        folder_path: str | Path,
        path_in_repo: str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        token: str | None = None,
        private: bool = True,
        revision: str | None = None,
        ignore_patterns: Patterns = None,
        *,
        card: ModelCard | None = None,
    ) -> Future[str]:
        """:meth:`push_to_hub` in a thread of its own; :meth:`wait_for` waits for it, and so does the process's end."""
        push = cls._pushes.threads().submit(
            cls.push_to_hub,
            repo_id,
            folder_path,
            path_in_repo,
            commit_message,
            commit_description,
            token,
            private,
            revision,
            ignore_patterns,
            card=card,
        )
        push.add_done_callback(lambda done: _say_failure(repo_id, done))
        cls._pushes.start(repo_id, push)
        return push

    @classmethod
    def wait_for(cls, repo_ids: Sequence[str] | None = None) -> dict[str, str]:
        """Wait for pushes that run; by repository the URL, or why it failed. Each is told once."""
        ends = {}
        for repo_id, push in cls._pushes.take(repo_ids).items():
            error = push.exception()
            ends[repo_id] = push.result() if error is None else str(error)
        return ends

    @classmethod
    def load_dataset(
        cls,
        dataset_id: str,
        subset_name: str = "default",
        split: str = "train",
        streaming: bool = False,
        num_proc: int | None = None,
        revision: str | None = None,
        *,
        token: str | None = None,
    ) -> DataSet:
        """The rows of a data set: a file or folder of this machine, or a repository of a hub, caches first.

        Code that lies beside data does not run.

        Raises:
            ConfigError: There is none, or no such subset or split; or ``datasets`` is not installed.
        """
        try:
            # It takes a second to import and comes with the extra alone.
            from twinkle.hub.data_sets import Part, load  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"data sets need {error.name}, which is not installed: pip install 'twinkle-queue[scripts]'"
            ) from error
        part = Part(subset=subset_name, split=split, streaming=streaming, num_proc=num_proc)
        return load(dataset_id, part, hub=cls.hub, revision=revision, token=token)

    @classmethod
    def download_model(
        cls,
        model_id_or_path: str,
        revision: str | None = None,
        download_model: bool = True,
        ignore_patterns: Patterns = None,
        *,
        ignore_model: bool = False,
        token: str | None = None,
    ) -> str:
        """The folder of a model, downloaded if no cache has it.

        Args:
            model_id_or_path: The id.
            revision: A branch, tag or commit, if the id names none.
            download_model: Whether the weights are wanted.
            ignore_patterns: More files to leave out.
            ignore_model: Whether the weights are not wanted.
            token: Default: as the hub's own library finds one.

        Raises:
            ConfigError: It is nowhere.
        """
        with_weights = download_model and not ignore_model
        ignored = [*_listed(ignore_patterns), *(() if with_weights else WEIGHT_FILES)]
        found = locate(
            model_id_or_path,
            hub=cls.hub,
            revision=revision,
            with_weights=with_weights,
            ignored=ignored,
            token=token,
        )
        return str(found.path)

    @classmethod
    def download_file(
        cls,
        repo_id: str,
        file_name: str,
        revision: str | None = None,
        *,
        repo_type: str = "model",
        token: str | None = None,
    ) -> str:
        """The path of one file of a repository, downloaded if no cache has it.

        Raises:
            ConfigError: It is nowhere.
        """
        if repo_type not in ("model", "dataset"):
            raise ConfigError(f"repo_type: {repo_type!r} is neither model nor dataset")
        kind: Kind = "dataset" if repo_type == "dataset" else "model"
        return str(locate_file(repo_id, file_name, kind=kind, hub=cls.hub, revision=revision, token=token))

    @classmethod
    def _target(cls, repo_id: str) -> tuple[str, str]:
        """The hub and the repository that a push goes to."""
        hub = cls.source_type(repo_id)
        repository = without_scheme(repo_id)
        if repository.count("/") != 1 or os.path.isabs(repository):
            raise ConfigError(f"repo_id: {repo_id}: name owner and repository, like ms://org/name")
        return hub, repository

    @classmethod
    def _remote(cls, hub: str) -> Remote:
        if is_offline(hub, HubSettings.read()):
            raise ConfigError(f"{hub}:// is not asked while TWINKLE_OFFLINE or HF_HUB_OFFLINE says so")
        return remote_of(hub)


class MSHub(HubOperation):
    """The operations, where an id without a scheme means ModelScope."""

    hub = MODELSCOPE


class HFHub(HubOperation):
    """The operations, where an id without a scheme means Hugging Face."""

    hub = HUGGING_FACE


def _listed(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _say_failure(repo_id: str, push: Future[str]) -> None:
    error = push.exception()
    if error is not None:
        _log.warning("hub.push_failed", id=repo_id, reason=str(error), next="training goes on; push again")
