"""The tables of tenants' files: names, contents that names share, the pieces they lie in, uploads, prepared rows."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Index, Text, UniqueConstraint, text
from sqlmodel import Field, SQLModel


class FileRow(SQLModel, table=True):
    """A name for a content."""

    __tablename__ = "file"
    __table_args__ = (
        Index("file_of_tenant", "tenant", "created_at", "id"),
        Index("file_of_content", "content"),
        Index(
            "file_end",
            "expires_at",
            sqlite_where=text("expires_at IS NOT NULL"),
            postgresql_where=text("expires_at IS NOT NULL"),
        ),
    )
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    content: str = Field(foreign_key="file_content.id")
    purpose: str
    name: str
    status: str
    problem: str | None = Field(default=None, sa_type=Text)
    created_at: float = Field(sa_type=Float)
    expires_at: float | None = Field(default=None, sa_type=Float)


class FileContentRow(SQLModel, table=True):
    """Bytes that a tenant has once, under however many names. The row outlives them: their storage must still be told.

    Two tenants never share one: whoever uploads would learn what others have.
    """

    __tablename__ = "file_content"
    __table_args__ = (
        Index(
            "file_content_once",
            "tenant",
            "sha256",
            unique=True,
            sqlite_where=text("ended_at IS NULL"),
            postgresql_where=text("ended_at IS NULL"),
        ),
        Index("file_content_of_tenant", "tenant", "created_at"),
        Index("file_content_end", "ended_at"),
    )
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    sha256: str
    size_bytes: int = Field(sa_type=BigInteger)
    num_lines: int | None = Field(default=None, sa_type=BigInteger)
    """Lines that are not blank, where it was looked at as lines of JSON."""
    problem: str | None = Field(default=None, sa_type=Text)
    """Which of them are no objects."""
    created_at: float = Field(sa_type=Float)
    ended_at: float | None = Field(default=None, sa_type=Float)


class FilePieceRow(SQLModel, table=True):
    """A blob with a stretch of a content, or of a part of an upload: the ``number``-th of its ``owner``."""

    __tablename__ = "file_piece"
    __table_args__ = (UniqueConstraint("owner", "number"),)
    key: str = Field(primary_key=True)
    owner: str
    number: int
    size_bytes: int = Field(sa_type=BigInteger)


class UploadRow(SQLModel, table=True):
    """A file on its way. ``sha256`` is what its sender says it has, by which a broken upload is found again."""

    __tablename__ = "upload"
    __table_args__ = (
        Index("upload_of_tenant", "tenant", "created_at"),
        Index("upload_end", "status", "expires_at"),
        Index(
            "upload_of_job",
            "job",
            sqlite_where=text("job IS NOT NULL AND status = 'pending'"),
            postgresql_where=text("job IS NOT NULL AND status = 'pending'"),
        ),
    )
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    purpose: str
    name: str
    size_bytes: int = Field(sa_type=BigInteger)
    sha256: str | None = None
    keep_s: float | None = Field(default=None, sa_type=Float)
    """How long the file is to stay."""
    job: str | None = None
    """The job that writes it, with whose end it ends; its size is not known before."""
    status: str
    file: str | None = None
    created_at: float = Field(sa_type=Float)
    expires_at: float = Field(sa_type=Float)


class UploadPartRow(SQLModel, table=True):
    """A stretch of a file on its way. A part with a number comes once; one without is put in its place at the end."""

    __tablename__ = "upload_part"
    __table_args__ = (UniqueConstraint("upload", "number"),)
    id: str = Field(primary_key=True)
    upload: str = Field(foreign_key="upload.id", index=True)
    number: int | None = None
    size_bytes: int = Field(sa_type=BigInteger)
    sha256: str
    created_at: float = Field(sa_type=Float)


class PreparedDataRow(SQLModel, table=True):
    """Rows that were made of a file or a data set, found by what they were made of; they end when nobody asks."""

    __tablename__ = "prepared_data"
    __table_args__ = (
        Index("prepared_data_used", "used_at"),
        Index("prepared_data_folder", "folder", unique=True),
    )
    tenant: str = Field(primary_key=True, foreign_key="tenant.id")
    digest: str = Field(primary_key=True)
    folder: str
    num_shards: int
    size_bytes: int = Field(sa_type=BigInteger)
    description: str = Field(sa_type=Text)
    created_at: float = Field(sa_type=Float)
    used_at: float = Field(sa_type=Float)
