"""Download URLs that need no key: each names one file and its end, under a signature nobody else can make."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from urllib.parse import quote, urlencode

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import Forbidden
from twinkle.core.settings import Settings
from twinkle.storage.blobs import BlobStore
from twinkle.wire.paths import SCHEME

DOWNLOADS = "/api/v1/downloads"
ARCHIVES = "/api/v1/archives"
TRACES = "/api/v1/traces"
_SECRET_FILE = "download-url-secret"
_SECRET_BYTES = 32

_log = structlog.get_logger()


class DownloadLinks:
    """Signs URLs and judges those that come back."""

    def __init__(self, secret: bytes, clock: Clock, blobs: BlobStore, *, presign: bool) -> None:
        """Prepare.

        Args:
            secret: Whoever knows it can make URLs.
            clock: Ends them.
            blobs: Where the files are.
            presign: Whether clients are sent to the object store itself, if it has a door.
        """
        self._secret = secret
        self._clock = clock
        self._blobs = blobs
        self._presign = presign

    def url_of(self, key: str, *, base_url: str, expires_at: int) -> str:
        """A URL under which anybody may read one stored file until ``expires_at`` (Unix seconds). May block."""
        if self._presign:
            url = self._blobs.presigned_url(key, expires_at - self._clock.now())
            if url is not None:
                return url
        query = urlencode({"expires": expires_at, "signature": self._sign(key, expires_at)})
        return f"{base_url.rstrip('/')}{DOWNLOADS}/{quote(key)}?{query}"

    def archive_url_of(self, path: str, seq: int, *, base_url: str, expires_at: int) -> str:
        """A URL under which anybody may read a checkpoint as a tar, as long as operation ``seq`` saved what it holds.

        It is this server's own wherever the files are: no object store puts files together.
        """
        signature = self._sign(_archive_of(path, seq), expires_at)
        query = urlencode({"seq": seq, "expires": expires_at, "signature": signature})
        return f"{base_url.rstrip('/')}{ARCHIVES}/{quote(path.removeprefix(SCHEME))}.tar?{query}"

    def check_archive(self, path: str, seq: int, *, expires_at: int, signature: str) -> None:
        """Let an archive's URL of ours pass; raises as :meth:`check` does."""
        self.check(_archive_of(path, seq), expires_at=expires_at, signature=signature)

    def trace_url_of(self, session_id: str, *, base_url: str, expires_at: int) -> str:
        """A URL under which anybody may read a session's trace; it is made anew for each."""
        query = urlencode({"expires": expires_at, "signature": self._sign(_trace_of(session_id), expires_at)})
        return f"{base_url.rstrip('/')}{TRACES}/{quote(session_id)}.pftrace?{query}"

    def check_trace(self, session_id: str, *, expires_at: int, signature: str) -> None:
        """Let a trace's URL of ours pass; raises as :meth:`check` does."""
        self.check(_trace_of(session_id), expires_at=expires_at, signature=signature)

    def check(self, key: str, *, expires_at: int, signature: str) -> None:
        """Let a URL of ours pass.

        Raises:
            Forbidden: It was tampered with, or its time is over.
        """
        if not hmac.compare_digest(self._sign(key, expires_at).encode(), signature.encode()):
            raise Forbidden("this download URL is not one of this server's; ask for a new one")
        if expires_at <= self._clock.now():
            raise Forbidden("this download URL has expired; ask for a new one")

    def _sign(self, key: str, expires_at: int) -> str:
        return hmac.new(self._secret, f"{expires_at}\n{key}".encode(), hashlib.sha256).hexdigest()


def _archive_of(path: str, seq: int) -> str:
    # No file's key begins so.
    return f"archive\n{seq}\n{path}"


def _trace_of(session_id: str) -> str:
    # No file's key begins so.
    return f"trace\n{session_id}"


def secret_of(settings: Settings) -> bytes:
    """The secret of the settings, else one kept in the home folder for its owner's eyes only. Blocks."""
    given = settings.download_url_secret.get_secret_value()
    if given:
        return given.encode()
    path = settings.home.absolute() / _SECRET_FILE
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path, secrets.token_urlsafe(_SECRET_BYTES))
        return path.read_bytes()
    except OSError as error:
        _log.warning(
            "downloads.secret_not_kept",
            error=error.strerror,
            next="download URLs end with this process; set TWINKLE_DOWNLOAD_URL_SECRET",
        )
        return secrets.token_bytes(_SECRET_BYTES)


def _create(path: Path, text: str) -> None:
    """Write the file unless it exists: complete from the first moment on, and never readable by others."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.link(fresh, path)
    except FileExistsError:
        return
    finally:
        fresh.unlink()
