"""When a run was last asked for something stands with its lane: a list in that order walks an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("lane", sa.Column("requested_at", sa.Float(), nullable=True))
    op.execute(
        "UPDATE lane SET requested_at = (SELECT COALESCE((SELECT o.accepted_at FROM operation o WHERE o.lane = lane.id"
        " AND o.seq = lane.max_seq), a.created_at) FROM adapter a WHERE a.id = lane.id)"
    )
    op.create_index(
        "lane_requested",
        "lane",
        ["tenant", "requested_at", "id"],
        sqlite_where=sa.text("requested_at IS NOT NULL"),
        postgresql_where=sa.text("requested_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("lane_requested", table_name="lane")
    op.drop_column("lane", "requested_at")
