"""Data sets and loaders that clients have on the server."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "processor",
        sa.Column("id", sa.String(), sa.ForeignKey("lane.id"), primary_key=True),
        sa.Column("tenant", sa.String(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("session", sa.String(), sa.ForeignKey("session.id"), nullable=False),
        sa.Column("processor_type", sa.String(), nullable=False),
        sa.Column("class_type", sa.String(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=True),
        sa.Column("applied_seq", sa.BigInteger(), nullable=False, server_default="-1"),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
    )
    live = sa.text("ended_at IS NULL")
    op.create_index("processor_live", "processor", ["tenant", "used_at"], sqlite_where=live, postgresql_where=live)


def downgrade() -> None:
    op.drop_index("processor_live", table_name="processor")
    op.drop_table("processor")
