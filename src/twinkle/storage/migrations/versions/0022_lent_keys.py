"""Keys that are lent for a while."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("expires_at", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("api_key", "expires_at")
