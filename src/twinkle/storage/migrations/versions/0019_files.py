"""Tenants' files, their uploads, and the rows that were made of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_LIVE = sa.text("ended_at IS NULL")
_WRITTEN = sa.text("job IS NOT NULL AND status = 'pending'")
_ENDS = sa.text("expires_at IS NOT NULL")


def upgrade() -> None:
    op.add_column("tenant", sa.Column("max_files_bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "file_content",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_lines", sa.BigInteger(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "file_content_once",
        "file_content",
        ["tenant", "sha256"],
        unique=True,
        sqlite_where=_LIVE,
        postgresql_where=_LIVE,
    )
    op.create_index("file_content_of_tenant", "file_content", ["tenant", "created_at"])
    op.create_table(
        "file",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("content", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.ForeignKeyConstraint(["content"], ["file_content.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("file_of_tenant", "file", ["tenant", "created_at", "id"])
    op.create_index("file_of_content", "file", ["content"])
    op.create_index("file_end", "file", ["expires_at"], sqlite_where=_ENDS, postgresql_where=_ENDS)
    op.create_table(
        "file_piece",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
        sa.UniqueConstraint("owner", "number"),
    )
    _uploads()
    op.create_table(
        "prepared_data",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("num_shards", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("tenant", "digest"),
    )
    op.create_index("prepared_data_used", "prepared_data", ["used_at"])
    op.create_index("prepared_data_folder", "prepared_data", ["folder"], unique=True)


def _uploads() -> None:
    op.create_table(
        "upload",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=True),
        sa.Column("keep_s", sa.Float(), nullable=True),
        sa.Column("job", sa.String(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("file", sa.String(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("upload_of_job", "upload", ["job"], sqlite_where=_WRITTEN, postgresql_where=_WRITTEN)
    op.create_index("upload_of_tenant", "upload", ["tenant", "created_at"])
    op.create_index("upload_end", "upload", ["status", "expires_at"])
    op.create_table(
        "upload_part",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("upload", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["upload"], ["upload.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("upload", "number"),
    )
    op.create_index("ix_upload_part_upload", "upload_part", ["upload"])


def downgrade() -> None:
    for table in ("prepared_data", "upload_part", "upload", "file_piece", "file", "file_content"):
        op.drop_table(table)
    op.drop_column("tenant", "max_files_bytes")
