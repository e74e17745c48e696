"""What a process of the service stands on, tried before it begins: broker, object store, address, by their settings.

What no waiting would mend ends the process with the reason; what does not answer yet is said once and waited for.
"""

from __future__ import annotations

import socket
import uuid

import redis
import structlog
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.settings import Settings
from twinkle.storage.blobs import BlobStore, lasting_reason, open_blob_store
from twinkle.storage.home import make_private_home

_BROKER_TIMEOUT_S = 5.0
_TRIAL = "trials/"
"""Where the trial is written; nothing else is below it."""
_TRIAL_REPEATS = 128

_log = structlog.get_logger()


def check_surroundings(settings: Settings) -> BlobStore:
    """The object store, after a look at it and at the broker.

    Raises:
        ConfigError: One is not named, or refuses what is needed of it.
    """
    if not settings.database_url and not settings.journal_file.exists():
        raise ConfigError(
            f"TWINKLE_DATABASE_URL: is not set, and there is no journal in {settings.home.absolute()}; name the"
            " service's database or its --home"
        )
    if not settings.database_url:
        make_private_home(settings.home)
    _check_broker(settings)
    blobs = open_blob_store(settings.resolved_object_store)
    _check_objects(blobs)
    return blobs


def refuse_taken(host: str, port: int, flags: str) -> None:
    """Try to listen, and stop again.

    Raises:
        ConfigError: Somebody listens there, or the address is not this machine's; it names the flags that say where.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another {flags}") from error


def _check_broker(settings: Settings) -> None:
    url = settings.redis_url.get_secret_value()
    if not url:
        raise ConfigError("TWINKLE_REDIS_URL: a broker must be named; `twinkle serve` starts one by itself")
    try:
        broker = redis.Redis.from_url(url, socket_timeout=_BROKER_TIMEOUT_S, socket_connect_timeout=_BROKER_TIMEOUT_S)
        with broker:
            broker.ping()
    except (AuthenticationError, NoPermissionError) as error:
        raise ConfigError(f"TWINKLE_REDIS_URL: the broker lets nobody in with this URL: {error}") from error
    except ValueError as error:
        raise ConfigError(f"TWINKLE_REDIS_URL: {error}") from error
    except RedisError as error:
        _log.warning("broker.unavailable", setting="TWINKLE_REDIS_URL", error=str(error), next="it is asked again")


def _check_objects(blobs: BlobStore) -> None:
    """Write, read back whole and in part, delete, and look whether it is gone."""
    name = uuid.uuid4().hex
    key, data = f"{_TRIAL}{name}", b"may be deleted: " + name.encode() * _TRIAL_REPEATS
    try:
        blobs.put(key, data)
        found, part = _found(blobs, key), blobs.get_range(key, len(name), len(name))
        blobs.delete(key)
        left = _found(blobs, key)
    except StorageUnavailable as error:
        reason = lasting_reason(error)
        if reason is not None:
            raise ConfigError(f"TWINKLE_OBJECT_STORE: {reason}") from error
        _log.warning(
            "objects.unavailable", setting="TWINKLE_OBJECT_STORE", error=error.message, next="it is asked again"
        )
        return
    except KeyError:
        # Between one reading and the next.
        found, part, left = None, b"", None
    if found is None:
        raise ConfigError("TWINKLE_OBJECT_STORE: what was written is not there to be read; use a store that keeps it")
    if found != data or part != data[len(name) : 2 * len(name)]:
        raise ConfigError(
            f"TWINKLE_OBJECT_STORE: it gave back other bytes than were written ({len(data)} written, {len(found)} read,"
            f" of which {sum(a == b for a, b in zip(data, found, strict=False))} are the same); use a store that keeps"
            " what it is given, or mend what lies between it and here"
        )
    if left is not None:
        raise ConfigError("TWINKLE_OBJECT_STORE: what was deleted can still be read; use a store that forgets it")


def _found(blobs: BlobStore, key: str) -> bytes | None:
    try:
        return blobs.get(key)
    except KeyError:
        return None
