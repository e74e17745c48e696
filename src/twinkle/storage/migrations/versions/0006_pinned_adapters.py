"""Adapters can be pinned to their device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter", sa.Column("pinned_at", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("adapter", "pinned_at")
