"""The object store: immutable bytes under a key. A folder with fsync, or S3, GCS and Azure through obstore."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Protocol

import obstore
import structlog
from obstore.exceptions import BaseError as ObstoreError
from obstore.exceptions import NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.process.crash import crash_point

CHECKPOINTS = "checkpoints/"
FILES = "files/"
PAYLOADS = "payloads/"
PREPARED = "prepared/"
RESULTS = "results/"
SNAPSHOTS = "snapshots/"
"""What every key of ours begins with, by what lies under it."""

_ENDPOINTS = ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT")
_TIMEOUT = "60s"
_RETRY_TIMEOUT = timedelta(seconds=30)

_log = structlog.get_logger()


def day_of(now: float) -> str:
    """The day, in UTC, that stands second in every key of ours: nobody writes to yesterday's keys."""
    return datetime.fromtimestamp(now, UTC).date().isoformat()


@dataclass(frozen=True, kw_only=True)
class StoredBlob:
    """What a store's listing says of one."""

    key: str
    size_bytes: int


class BlobStore(Protocol):
    """Bytes under keys like ``results/2026-03-01/run/number``. A put is complete or did not happen."""

    def put(self, key: str, data: bytes) -> None:
        """Store ``data``, replacing what was there. Durable when it returns.

        Raises:
            StorageUnavailable: It could not be stored; worth another attempt.
        """
        ...

    def get(self, key: str) -> bytes:
        """Read everything.

        Raises:
            KeyError: There is nothing under this key.
            StorageUnavailable: The store did not answer.
        """
        ...

    def size_bytes(self, key: str) -> int:
        """How much there is to read; raises as :meth:`get` does."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read at most ``length`` bytes from ``start`` on; raises as :meth:`get` does."""
        ...

    def scan(self, *, after: str, limit: int) -> list[StoredBlob]:
        """The first ``limit`` blobs whose keys come after this one, in the order of their bytes.

        Raises:
            StorageUnavailable: The store did not answer.
        """
        ...

    def presigned_url(self, key: str, lifetime_s: float) -> str | None:
        """A URL of the store's own that anybody may read for so long; ``None`` from a store that has no door."""
        ...

    def delete(self, key: str) -> None:
        """Remove it; nothing happens if it is not there.

        Raises:
            StorageUnavailable: The store did not answer.
        """
        ...


def open_blob_store(url: str) -> BlobStore:
    """A folder for a path or ``file://`` URL, obstore for everything else (credentials from the environment).

    Raises:
        ConfigError: There is no store of that kind, or no such folder can be made.
    """
    try:
        if "://" not in url or url.startswith("file://"):
            return FolderStore(Path(url.removeprefix("file://")))
        return ObjectStore(url)
    except (ObstoreError, OSError) as error:
        raise ConfigError(f"TWINKLE_OBJECT_STORE: {url} cannot be opened: {_first_line(error)}") from error


def lasting_reason(error: StorageUnavailable) -> str | None:
    """Why a store refused what no waiting would change; ``None`` where it did not answer, or has no room left."""
    cause = error.__cause__
    if isinstance(cause, NotFoundError | FileNotFoundError):
        return f"there is no such bucket: {_first_line(cause)}"
    if isinstance(cause, PermissionDeniedError | UnauthenticatedError | PermissionError | NotADirectoryError):
        return f"it lets nobody write with these credentials: {_first_line(cause)}"
    if isinstance(cause, OSError) and cause.errno == errno.EROFS:
        return "it is read-only"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _checked(key: str) -> str:
    """The key itself, unless some store would read it as another one or as a way out of its folder."""
    if "\x00" in key or any(part in {"", ".", ".."} for part in key.split("/")):
        raise ValueError(f"not a key: {key!r}")
    return key


class FolderStore:
    """Files below one folder, written to a temporary name, flushed to the disk and renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        """Store ``data``; see :class:`BlobStore`."""
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            crash_point("blob.written")
            temporary.rename(path)
            _flush_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageUnavailable(f"the object store could not write {key}: {error.strerror}") from error

    def get(self, key: str) -> bytes:
        """Read everything; see :class:`BlobStore`."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None
        except OSError as error:
            raise StorageUnavailable(f"the object store could not read {key}: {error.strerror}") from error

    def size_bytes(self, key: str) -> int:
        """How much there is to read; see :class:`BlobStore`."""
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            raise KeyError(key) from None
        except OSError as error:
            raise StorageUnavailable(f"the object store could not read {key}: {error.strerror}") from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part; see :class:`BlobStore`."""
        try:
            with self._path(key).open("rb") as file:
                file.seek(start)
                return file.read(length)
        except FileNotFoundError:
            raise KeyError(key) from None
        except OSError as error:
            raise StorageUnavailable(f"the object store could not read {key}: {error.strerror}") from error

    def scan(self, *, after: str, limit: int) -> list[StoredBlob]:
        """Some blobs, also those of files whose writer died; see :class:`BlobStore`."""
        try:
            return [*islice(_files_below(self._root, "", after), limit)]
        except OSError as error:
            raise StorageUnavailable(f"the object store could not be listed: {error.strerror}") from error

    def presigned_url(self, key: str, lifetime_s: float) -> str | None:
        """A folder has no door of its own."""
        return None

    def delete(self, key: str) -> None:
        """Remove it, and folders that it leaves empty; see :class:`BlobStore`."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageUnavailable(f"the object store could not delete {key}: {error.strerror}") from error
        with suppress(OSError):
            while (path := path.parent) != self._root:
                path.rmdir()

    def _path(self, key: str) -> Path:
        return self._root.joinpath(*_checked(key).split("/"))


def _files_below(folder: Path, prefix: str, after: str) -> Iterator[StoredBlob]:
    """In the order of their keys, in which a folder stands where its name with a slash does."""
    with os.scandir(folder) as entries:
        names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries)
    for name in names:
        key = prefix + name
        if not name.endswith("/"):
            if key > after:
                yield StoredBlob(key=key, size_bytes=(folder / name).stat().st_size)
        elif key > after or after.startswith(key):
            with suppress(FileNotFoundError):  # it was emptied just now
                yield from _files_below(folder / name, key, after)


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def speaks_http() -> bool:
    """Whether the operator's object store is reached without TLS, as one on the same network may be."""
    return any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)


def _unavailable(verb: str, key: str, error: Exception) -> StorageUnavailable:
    """Without what the server said, which is for its operator: a tenant may see this message."""
    _log.warning("blobs.unavailable", verb=verb, key=key, error=str(error).partition("\n")[0])
    return StorageUnavailable(f"the object store could not {verb} {key}: {type(error).__name__}")


class ObjectStore:
    """A bucket, through obstore."""

    def __init__(self, url: str) -> None:
        self._store = from_url(
            url,
            client_options={"allow_http": speaks_http(), "timeout": _TIMEOUT},
            retry_config={"retry_timeout": _RETRY_TIMEOUT},
        )

    def put(self, key: str, data: bytes) -> None:
        """Store ``data``; see :class:`BlobStore`."""
        try:
            obstore.put(self._store, _checked(key), data)
        except (ObstoreError, OSError) as error:
            raise _unavailable("write", key, error) from error

    def get(self, key: str) -> bytes:
        """Read everything; see :class:`BlobStore`."""
        try:
            return bytes(obstore.get(self._store, _checked(key)).bytes())
        except (FileNotFoundError, NotFoundError):
            raise KeyError(key) from None
        except (ObstoreError, OSError) as error:
            raise _unavailable("read", key, error) from error

    def size_bytes(self, key: str) -> int:
        """How much there is to read; see :class:`BlobStore`."""
        try:
            return int(obstore.head(self._store, _checked(key))["size"])
        except (FileNotFoundError, NotFoundError):
            raise KeyError(key) from None
        except (ObstoreError, OSError) as error:
            raise _unavailable("read", key, error) from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part; see :class:`BlobStore`."""
        try:
            return bytes(obstore.get_range(self._store, _checked(key), start=start, length=length))
        except (FileNotFoundError, NotFoundError):
            raise KeyError(key) from None
        except (ObstoreError, OSError) as error:
            raise _unavailable("read", key, error) from error

    def scan(self, *, after: str, limit: int) -> list[StoredBlob]:
        """Some blobs; see :class:`BlobStore`."""
        try:
            page = next(iter(obstore.list(self._store, offset=after or None, chunk_size=limit)), [])
        except (ObstoreError, OSError) as error:
            raise _unavailable("list after", after, error) from error
        return [StoredBlob(key=found["path"], size_bytes=found["size"]) for found in page]

    def presigned_url(self, key: str, lifetime_s: float) -> str | None:
        """A URL signed with the store's credentials; see :class:`BlobStore`."""
        if not isinstance(self._store, S3Store | GCSStore | AzureStore):
            return None
        try:
            return str(obstore.sign(self._store, "GET", _checked(key), timedelta(seconds=lifetime_s)))
        except (ObstoreError, OSError) as error:
            raise _unavailable("sign", key, error) from error

    def delete(self, key: str) -> None:
        """Remove it; see :class:`BlobStore`."""
        try:
            obstore.delete(self._store, _checked(key))
        except (FileNotFoundError, NotFoundError):
            return
        except (ObstoreError, OSError) as error:
            raise _unavailable("delete", key, error) from error
