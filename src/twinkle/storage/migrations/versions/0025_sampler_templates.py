"""How conversations become prompts where a session samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sampler_template",
        sa.Column("session", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("adapter_name", sa.String(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["session"], ["session.id"]),
        sa.PrimaryKeyConstraint("session", "base_model", "adapter_name"),
    )


def downgrade() -> None:
    op.drop_table("sampler_template")
