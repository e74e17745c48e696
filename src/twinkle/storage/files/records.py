"""What is told of files and uploads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from twinkle.core.ids import new_id


class FileStatus(StrEnum):
    """Whether a file can be used for what it was uploaded for, in OpenAI's words."""

    UPLOADED = "uploaded"
    PROCESSED = "processed"
    ERROR = "error"


class UploadStatus(StrEnum):
    """Where an upload is."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a tenant's."""

    id: str
    tenant: str
    purpose: str
    name: str
    content: str
    size_bytes: int
    sha256: str
    status: FileStatus
    problem: str | None
    num_lines: int | None
    created_at: float
    expires_at: float | None


@dataclass(frozen=True, kw_only=True)
class FilePiece:
    """A stretch of a file, as it lies in the object store."""

    key: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class ContentFacts:
    """What reading a content as a whole has shown."""

    sha256: str
    size_bytes: int
    num_lines: int | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class NewFile:
    """A name that a content is to get."""

    tenant: str
    purpose: str
    name: str
    expires_at: float | None = None
    id: str = field(default_factory=lambda: f"file-{new_id()}")


@dataclass(frozen=True, kw_only=True)
class NewUpload:
    """A file that is about to come."""

    tenant: str
    purpose: str
    name: str
    size_bytes: int
    sha256: str | None = None
    keep_s: float | None = None
    id: str = field(default_factory=lambda: f"upload_{new_id()}")


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file on its way, or one that was."""

    id: str
    tenant: str
    purpose: str
    name: str
    size_bytes: int
    sha256: str | None
    keep_s: float | None
    status: UploadStatus
    file: str | None
    created_at: float
    expires_at: float

    def named(self, *, now: float) -> NewFile:
        """The file that becomes of it."""
        return NewFile(
            tenant=self.tenant,
            purpose=self.purpose,
            name=self.name,
            expires_at=None if self.keep_s is None else now + self.keep_s,
        )


@dataclass(frozen=True, kw_only=True)
class NewPart:
    """A part that has come, whose pieces are durable."""

    sha256: str
    pieces: tuple[FilePiece, ...]
    number: int | None = None
    id: str = field(default_factory=lambda: f"part_{new_id()}")

    @property
    def size_bytes(self) -> int:
        """Of all pieces."""
        return sum(piece.size_bytes for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class UploadPart:
    """A part that is there."""

    id: str
    upload: str
    number: int | None
    size_bytes: int
    sha256: str
    created_at: float
