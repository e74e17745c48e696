"""Results have a known size, so that a large one can be announced before it is sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operation", sa.Column("result_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("operation", "result_bytes")
