"""Bodies of files and uploads: OpenAI's, and our own by which a broken upload is taken up again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.base import MAX_INT64, Name, RequestBody, ResponseBody, Text

PURPOSES = ("fine-tune", "batch", "user_data", "evals")
"""What a file may be uploaded for."""
MAX_NAME_CHARS = 512
MAX_PARTS = 10_000
PART_BYTES = 64 * 2**20
"""Of one part at most, as OpenAI has it."""
MIN_KEEP_S = 3600
MAX_KEEP_S = 30 * 24 * 3600

FileName = Annotated[Name, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Purpose = Annotated[Text, Field(min_length=1, max_length=64)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ExpiresAfter(RequestBody):
    """When a file is to end."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_KEEP_S, le=MAX_KEEP_S)


class CreateUploadRequest(RequestBody):
    """``POST /v1/uploads``. The type is not looked at: the name says what a file is."""

    bytes: int = Field(ge=1, le=MAX_INT64)
    filename: FileName
    mime_type: str | None = Field(default=None, max_length=256)
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteUploadRequest(RequestBody):
    """``POST /v1/uploads/{id}/complete``."""

    part_ids: list[Text] = Field(max_length=MAX_PARTS)
    md5: str | None = Field(default=None, max_length=64)


class OpenUploadRequest(RequestBody):
    """``POST /api/native/v1/uploads``: what is to be sent, by which it is found again or need not be sent at all."""

    filename: FileName
    size_bytes: int = Field(ge=1, le=MAX_INT64)
    sha256: Sha256
    purpose: Purpose = "fine-tune"
    expires_after_s: int | None = Field(default=None, ge=MIN_KEEP_S, le=MAX_KEEP_S)


class FileInfo(ResponseBody):
    """A file."""

    id: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    status: Literal["uploaded", "processed", "error"]
    problem: str | None = None
    num_lines: int | None = None
    created_at: float
    expires_at: float | None = None


class FilesResponse(ResponseBody):
    """``GET /api/native/v1/files``: the newest first."""

    files: list[FileInfo]
    has_more: bool


class PartInfo(ResponseBody):
    """A part that is there."""

    number: int
    size_bytes: int
    sha256: str


class OpenUploadResponse(ResponseBody):
    """Either the file, which is there already, or the upload with the parts that have come."""

    file: FileInfo | None = None
    upload_id: str | None = None
    part_bytes: int = PART_BYTES
    parts: list[PartInfo] = Field(default_factory=list)


def check_purpose(purpose: str) -> None:
    """Refuse what nothing here would be done with.

    Raises:
        InvalidInput: It names those that there are.
    """
    if purpose not in PURPOSES:
        raise InvalidInput("purpose", f"is {purpose[:64]!r}; send one of {', '.join(PURPOSES)}")
