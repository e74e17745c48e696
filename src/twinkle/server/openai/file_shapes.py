"""Files and uploads as OpenAI's clients read them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from twinkle.storage.files.records import StoredFile, Upload, UploadPart, UploadStatus

_NOTHING_ELSE = ConfigDict(extra="forbid")


@with_config(_NOTHING_ELSE)
class FileObject(TypedDict):
    """A file; ``status_details`` tells which of its lines are wrong."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None


@with_config(_NOTHING_ELSE)
class FileList(TypedDict):
    """``GET /v1/files``."""

    object: Literal["list"]
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


@with_config(_NOTHING_ELSE)
class FileDeleted(TypedDict):
    """``DELETE /v1/files/{id}``."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


@with_config(_NOTHING_ELSE)
class UploadObject(TypedDict):
    """A file on its way; with the file when it is complete."""

    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None


@with_config(_NOTHING_ELSE)
class UploadPartObject(TypedDict):
    """A part of one."""

    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


def file_object(file: StoredFile) -> FileObject:
    """A file in OpenAI's words."""
    return FileObject(
        id=file.id,
        object="file",
        bytes=file.size_bytes,
        created_at=int(file.created_at),
        expires_at=None if file.expires_at is None else int(file.expires_at),
        filename=file.name,
        purpose=file.purpose,
        status=file.status.value,
        status_details=file.problem,
    )


def upload_object(upload: Upload, file: StoredFile | None = None) -> UploadObject:
    """An upload in OpenAI's words."""
    return UploadObject(
        id=upload.id,
        object="upload",
        bytes=upload.size_bytes,
        created_at=int(upload.created_at),
        expires_at=int(upload.expires_at),
        filename=upload.name,
        purpose=upload.purpose,
        status=(UploadStatus.COMPLETED if file is not None else upload.status).value,
        file=None if file is None else file_object(file),
    )


def part_object(part: UploadPart) -> UploadPartObject:
    """A part in OpenAI's words."""
    return UploadPartObject(id=part.id, object="upload.part", created_at=int(part.created_at), upload_id=part.upload)
