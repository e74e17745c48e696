"""Meshes that are asked for and drained; lanes on their way to another mesh."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_MOVING = sa.text("moving_to IS NOT NULL")


def upgrade() -> None:
    op.add_column("mesh", sa.Column("draining_at", sa.Float(), nullable=True))
    op.add_column("mesh", sa.Column("drains_to", sa.String(), nullable=True))
    op.add_column("mesh", sa.Column("asked_for", sa.Text(), nullable=True))
    op.add_column("lane", sa.Column("moving_to", sa.String(), nullable=True))
    op.create_index("lane_moving", "lane", ["mesh", "id"], sqlite_where=_MOVING, postgresql_where=_MOVING)


def downgrade() -> None:
    op.drop_index("lane_moving", "lane")
    op.drop_column("lane", "moving_to")
    op.drop_column("mesh", "asked_for")
    op.drop_column("mesh", "drains_to")
    op.drop_column("mesh", "draining_at")
