"""Adapters whose clients may be there are found among all that ever were: a new one is placed by those."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text("parked_at IS NULL")
    op.create_index("adapter_present", "adapter", ["mesh"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_index("adapter_present", "adapter")
