"""Download URLs that need no key: each names one content and its end, under a signature nobody else can make.

The signature covers the content's generation too, so an owner who takes back what was given out ends every URL at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlencode

from twinkle.core.adapter import Checkpoint
from twinkle.core.clock import Clock
from twinkle.core.errors import Forbidden, NotFound
from twinkle.server.access.signing import Part, Signer
from twinkle.storage.blobs import BlobStore
from twinkle.wire.paths import SCHEME

DOWNLOADS = "/api/v1/downloads"
ARCHIVES = "/api/v1/archives"
TRACES = "/api/v1/traces"
_FILE = "download of a file"
_ARCHIVE = "download of an archive"
_TRACE = "download of a trace"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a URL of ours says besides what it is of: which content, as long as what was given out is not taken back."""

    content: str
    generation: int
    expires_at: int
    signature: str

    def check_still(self, checkpoint: Checkpoint) -> None:
        """Let what the URL was made for pass.

        Raises:
            NotFound: It is another content by now, or was taken back.
        """
        if (checkpoint.content, checkpoint.generation) != (self.content, self.generation):
            raise NotFound("what this download URL was made for was replaced or unpublished; ask for a new one")


class DownloadLinks:
    """Signs URLs and judges those that come back."""

    def __init__(
        self, signer: Signer, clock: Clock, blobs: BlobStore, *, lifetime_s: int, presigned_lifetime_s: int | None
    ) -> None:
        """Prepare.

        Args:
            signer: Makes and knows signatures.
            clock: Ends them.
            blobs: Where the files are.
            lifetime_s: How long a URL of ours works.
            presigned_lifetime_s: Let owners go to the object store itself, if it has a door, for so long: nobody can
                take such a URL back. ``None``: everything is served from here.
        """
        self._signer = signer
        self._clock = clock
        self._blobs = blobs
        self._lifetime_s = lifetime_s
        self._presigned_lifetime_s = presigned_lifetime_s

    def file_urls_of(self, checkpoint: Checkpoint, *, reader: str, base_url: str) -> tuple[dict[str, str], int]:
        """URLs under which anybody may read a checkpoint's files, and when they end (Unix seconds). May block.

        Only its owner is sent to the object store: what others may read must be taken back when the owner says so.
        """
        if self._presigned_lifetime_s is not None and reader == checkpoint.tenant:
            urls = {
                name: self._blobs.presigned_url(stored.key, self._presigned_lifetime_s)
                for name, stored in checkpoint.files.items()
            }
            signed = {name: url for name, url in urls.items() if url is not None}
            if len(signed) == len(urls):
                return signed, int(self._clock.now()) + self._presigned_lifetime_s
        expires_at = self.expires_at
        return {
            name: self.file_url_of(checkpoint, name, base_url=base_url, expires_at=expires_at)
            for name in checkpoint.files
        }, expires_at

    @property
    def expires_at(self) -> int:
        """When a URL of ours that is made now ends (Unix seconds)."""
        return int(self._clock.now()) + self._lifetime_s

    def file_url_of(self, checkpoint: Checkpoint, name: str, *, base_url: str, expires_at: int) -> str:
        """A URL of ours for one file of a checkpoint."""
        where = f"{DOWNLOADS}/{checkpoint.content}/{quote(name)}"
        content, generation = checkpoint.content, checkpoint.generation
        signature = self._signer.sign(_FILE, name, content, generation, expires_at)
        query = {"generation": generation, "expires": expires_at, "signature": signature}
        return f"{base_url.rstrip('/')}{where}?{urlencode(query)}"

    def check_file(self, name: str, given: Given) -> None:
        """Let a file's URL of ours pass.

        Raises:
            Forbidden: It was tampered with, or its time is over.
        """
        self._check(_FILE, name, given.content, given.generation, expires_at=given.expires_at, by=given.signature)

    def archive_url_of(self, checkpoint: Checkpoint, *, base_url: str, expires_at: int) -> str:
        """A URL under which anybody may read a checkpoint as a tar.

        It is this server's own wherever the files are: no object store puts files together.
        """
        content, generation = checkpoint.content, checkpoint.generation
        signature = self._signer.sign(_ARCHIVE, checkpoint.path, content, generation, expires_at)
        query = {"content": content, "generation": generation, "expires": expires_at, "signature": signature}
        return f"{base_url.rstrip('/')}{ARCHIVES}/{quote(checkpoint.path.removeprefix(SCHEME))}.tar?{urlencode(query)}"

    def check_archive(self, path: str, given: Given) -> None:
        """Let an archive's URL of ours pass; raises as :meth:`check_file` does."""
        self._check(_ARCHIVE, path, given.content, given.generation, expires_at=given.expires_at, by=given.signature)

    def trace_url_of(self, session_id: str, *, base_url: str) -> str:
        """A URL under which anybody may read a session's trace; it is made anew for each."""
        expires_at = self.expires_at
        query = {"expires": expires_at, "signature": self._signer.sign(_TRACE, session_id, expires_at)}
        return f"{base_url.rstrip('/')}{TRACES}/{quote(session_id)}.pftrace?{urlencode(query)}"

    def check_trace(self, session_id: str, *, expires_at: int, signature: str) -> None:
        """Let a trace's URL of ours pass; raises as :meth:`check_file` does."""
        self._check(_TRACE, session_id, expires_at=expires_at, by=signature)

    def _check(self, purpose: str, *parts: Part, expires_at: int, by: str) -> None:
        if not self._signer.is_signed(purpose, *parts, expires_at, signature=by):
            raise Forbidden("this download URL is not one of this server's; ask for a new one")
        if expires_at <= self._clock.now():
            raise Forbidden("this download URL has expired; ask for a new one")
