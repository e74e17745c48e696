"""A mesh keeps its virtual time, so that a lane which was idle has no head start."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("mesh", sa.Column("vtime", sa.Float(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("mesh") as batch_op:
        batch_op.drop_column("vtime")
