"""Adapters that their clients have unloaded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_TO_CLEAR = sa.text("unload_seq > floor_seq")


def upgrade() -> None:
    op.add_column("lane", sa.Column("unload_seq", sa.BigInteger(), nullable=True))
    op.create_index("lane_unloaded", "lane", ["id"], sqlite_where=_TO_CLEAR, postgresql_where=_TO_CLEAR)


def downgrade() -> None:
    op.drop_index("lane_unloaded", "lane")
    op.drop_column("lane", "unload_seq")
