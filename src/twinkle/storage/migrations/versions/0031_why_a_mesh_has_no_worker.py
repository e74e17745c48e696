"""Why a mesh's last worker did not start."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("mesh", sa.Column("trouble", sa.Text(), nullable=True))
    op.add_column("mesh", sa.Column("trouble_at", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("mesh", "trouble_at")
    op.drop_column("mesh", "trouble")
