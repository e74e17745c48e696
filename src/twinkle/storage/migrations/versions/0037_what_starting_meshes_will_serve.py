"""What a mesh will serve is known while its worker starts, before it says so itself."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("mesh", sa.Column("announced", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("mesh", "announced")
