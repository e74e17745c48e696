"""What housekeeping and the board of meshes look for is found by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_PRUNABLE = sa.text("pruned_seq < floor_seq")


def upgrade() -> None:
    op.create_index("lane_prunable", "lane", ["id"], sqlite_where=_PRUNABLE, postgresql_where=_PRUNABLE)
    op.create_index("adapter_of_mesh", "adapter", ["mesh"])


def downgrade() -> None:
    op.drop_index("adapter_of_mesh", "adapter")
    op.drop_index("lane_prunable", "lane")
