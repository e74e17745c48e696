"""Checkpoints as files in the object store: written, read back and verified before anybody can see them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Generic

from twinkle.core.adapter import AdapterConfig, Checkpoint, CheckpointKind, StoredFile
from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidInput, NotFound, StorageUnavailable
from twinkle.core.file_names import ENCRYPTED_SUFFIX
from twinkle.core.ids import new_id
from twinkle.core.process.crash import crash_point
from twinkle.storage.blobs import CHECKPOINTS, BlobStore, day_of
from twinkle.storage.stores import Stores
from twinkle.wire.paths import CheckpointPath, parse_checkpoint_path, validate_name
from twinkle.workers.engine import Engine, State
from twinkle.workers.steps import Steps, Transfers

_RECIPIENTS_FIELD = "age_encryption_recipients"


@dataclass(frozen=True, kw_only=True)
class CheckpointToSave:
    """What a client asked to keep of an adapter, and under which name."""

    kind: CheckpointKind
    name: str
    overwrite: bool = False
    ttl_s: float | None = None
    user_metadata: dict[str, str] | None = None
    age_recipients: Sequence[str] = ()
    with_optimizer: bool = True
    """Of one that is for training."""


class Artifacts(Generic[State]):
    """Saves adapters as checkpoints and loads checkpoints as adapters."""

    def __init__(
        self, *, engine: Engine[State], stores: Stores, blobs: BlobStore, clock: Clock, transfers: Transfers
    ) -> None:
        self._engine = engine
        self._adapters = stores.adapters
        self._checkpoints = stores.checkpoints
        self._blobs = blobs
        self._clock = clock
        self._transfers = transfers

    def save(self, state: State, save: CheckpointToSave, *, adapter: str, seq: int) -> Steps[Checkpoint]:
        """Write an adapter's files; the checkpoint exists once the caller has committed it.

        Only the copy off the device is the step loop's; it waits until there is room for it.

        The keys name the operation, so that a replaced checkpoint is never half old, half new, and the content, so that
        a holder that has lost its mesh and writes late replaces nobody's bytes. Saving the same state under the same
        name again is the same content, in files of its own: those of before may be deleted at any moment.

        Raises:
            InvalidInput: The name is unusable, or taken by other content and not to be overwritten; or the files cannot
                be encrypted to the recipients.
        """
        owner = self._adapters.find(adapter)
        validate_name(save.name, field="path")
        path = str(CheckpointPath(adapter, save.kind.segment, save.name))
        existing = None if save.overwrite else self._existing(path)
        yield from self._transfers.room()
        with_optimizer = save.kind is CheckpointKind.TRAINING and save.with_optimizer
        contents = self._engine.export(state, with_optimizer=with_optimizer)
        now = self._clock.now()
        folder = f"{CHECKPOINTS}{day_of(now)}/{adapter.replace(':', '/')}/{save.kind.segment}/{save.name}/{seq}"
        files = yield from self._transfers.away(
            partial(self._store_all, folder, contents, save.age_recipients, existing),
            num_bytes=sum(len(data) for data in contents.values()),
        )
        if existing is not None:
            # Under an id of its own, which it gives up if it is committed while the name still means the same.
            return existing.model_copy(update={"seq": seq, "files": files, "content": new_id()})
        return Checkpoint(
            path=path,
            tenant=owner.tenant,
            adapter=adapter,
            kind=save.kind,
            name=save.name,
            seq=seq,
            config=owner.config,
            files=files,
            created_at=now,
            expires_at=None if save.ttl_s is None else now + save.ttl_s,
            user_metadata=save.user_metadata,
        )

    def load(
        self,
        config: AdapterConfig,
        path: str,
        *,
        adapter: str,
        content: str | None,
        with_optimizer: bool,
        trainable: bool,
    ) -> Steps[State]:
        """An adapter from a checkpoint.

        Args:
            config: What the adapter must look like.
            path: ``tinker://...``
            adapter: Which one it is. Its own checkpoints are found by name: its saves and loads are in one order.
            content: What another run's path meant, and its tenant was allowed to read, when the load was accepted.
            with_optimizer: Also the moments and the step count; else a cold start.
            trainable: Whether it will get gradients.

        Raises:
            InvalidInput: There is no such checkpoint, or not any more, or it does not fit ``config``.
        """
        files = yield from self.files_to_load(
            config, path, adapter=adapter, content=content, with_optimizer=with_optimizer
        )
        return self._engine.load(config, files, with_optimizer=with_optimizer, trainable=trainable)

    def files_to_load(
        self, config: AdapterConfig, path: str, *, adapter: str, content: str | None, with_optimizer: bool
    ) -> Steps[dict[str, bytes]]:
        """The files of a checkpoint that an adapter may load; arguments and errors are those of :meth:`load`."""
        checkpoint = self._find(path, adapter=adapter, content=content)
        if checkpoint.config.base_model != config.base_model:
            raise InvalidInput(
                "path", f"{path} is of base model {checkpoint.config.base_model!r}, not {config.base_model!r}"
            )
        if checkpoint.config.is_whole_model != config.is_whole_model:
            is_whole = checkpoint.config.is_whole_model
            kind, other = ("a whole model", "an adapter") if is_whole else ("an adapter", "the whole model")
            raise InvalidInput("path", f"{path} holds the weights of {kind}, and this run trains {other}")
        if checkpoint.is_encrypted:
            raise InvalidInput("path", f"{path} is encrypted to a key that only its owner has; it cannot be loaded")
        if with_optimizer and checkpoint.kind is not CheckpointKind.TRAINING:
            raise InvalidInput("optimizer", f"{path} holds weights only; load it without the optimizer state")
        return (yield from self.read_files(checkpoint))

    def read_files(self, checkpoint: Checkpoint) -> Steps[dict[str, bytes]]:
        """A checkpoint's files, verified.

        Raises:
            StorageUnavailable: A file cannot be read, or is not what was written.
        """
        yield from self._transfers.room()
        return (
            yield from self._transfers.away(
                lambda: {name: self._fetch(file) for name, file in checkpoint.files.items()},
                num_bytes=checkpoint.size_bytes,
            )
        )

    def _store_all(
        self, folder: str, contents: dict[str, bytes], age_recipients: Sequence[str], existing: Checkpoint | None
    ) -> dict[str, StoredFile]:
        """Write files and read them back, on a thread of the transfers."""
        if age_recipients:
            contents = encrypt_files(contents, age_recipients)
        if existing is not None and _digests_of(existing) != {name: _sha256(data) for name, data in contents.items()}:
            raise InvalidInput(
                "path",
                f"checkpoint {existing.path} exists with other content; save under another name,"
                " delete it first, or pass overwrite=True",
            )
        return {name: self._store(f"{folder}/{_sha256(data)[:32]}/{name}", data) for name, data in contents.items()}

    def _find(self, path: str, *, adapter: str, content: str | None) -> Checkpoint:
        try:
            if content is not None:
                return self._checkpoints.content(content)
            if parse_checkpoint_path(path).run_id == adapter:
                return self._checkpoints.find(path)
        except NotFound:
            pass
        raise InvalidInput(
            "path", f"there is no checkpoint {path!r}, or not any more; list what there is with list_user_checkpoints()"
        )

    def _existing(self, path: str) -> Checkpoint | None:
        try:
            return self._checkpoints.find(path)
        except NotFound:
            return None

    def _store(self, key: str, data: bytes) -> StoredFile:
        self._blobs.put(key, data)
        crash_point("checkpoint.file_stored")
        file = StoredFile(key=key, size_bytes=len(data), sha256=_sha256(data))
        self._fetch(file)
        return file

    def _fetch(self, file: StoredFile) -> bytes:
        try:
            data = self._blobs.get(file.key)
        except KeyError:
            raise StorageUnavailable(f"{file.key} is not in the object store") from None
        if len(data) != file.size_bytes or _sha256(data) != file.sha256:
            raise StorageUnavailable(f"{file.key} is not what was written: {len(data)} of {file.size_bytes} bytes")
        return data


def encrypt_files(files: dict[str, bytes], recipients: Sequence[str]) -> dict[str, bytes]:
    """The same files, each readable by any of the recipients and named ``*.age`` (filippo.io/age).

    That needs the optional package ``pyrage``.

    Args:
        files: Contents by name.
        recipients: ``age1...`` keys, or SSH public keys.

    Raises:
        InvalidInput: A recipient is no such key, or this worker cannot encrypt.
    """
    if importlib.util.find_spec("pyrage") is None:
        raise InvalidInput(
            _RECIPIENTS_FIELD, "this server cannot encrypt (pyrage is not installed); save without recipients"
        )
    pyrage = importlib.import_module("pyrage")
    keys = [_recipient(pyrage, text) for text in recipients]
    return {f"{name}{ENCRYPTED_SUFFIX}": bytes(pyrage.encrypt(data, keys)) for name, data in files.items()}


def _digests_of(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: file.sha256 for name, file in checkpoint.files.items()}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _recipient(pyrage: ModuleType, text: str) -> Any:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise InvalidInput(
            _RECIPIENTS_FIELD, f"{text[:80]!r} is neither an age1... key nor an SSH public key"
        ) from error
