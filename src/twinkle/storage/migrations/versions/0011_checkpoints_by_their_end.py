"""Checkpoints whose time is over are found by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_ENDS = sa.text("expires_at IS NOT NULL")


def upgrade() -> None:
    op.create_index("checkpoint_end", "checkpoint", ["expires_at"], sqlite_where=_ENDS, postgresql_where=_ENDS)


def downgrade() -> None:
    op.drop_index("checkpoint_end", "checkpoint")
