"""Checkpoints that are pushed by themselves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "push",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("tenant", sa.String(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("last_job", sa.String(), nullable=True),
    )
    op.create_index("push_of_run", "push", ["tenant", "run"], unique=True)
    op.add_column("checkpoint", sa.Column("pushed", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoint", "pushed")
    op.drop_index("push_of_run", table_name="push")
    op.drop_table("push")
