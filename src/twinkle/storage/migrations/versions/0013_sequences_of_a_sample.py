"""How many sequences a sample draws is known when it is claimed: the sampler's room is counted in those."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operation", sa.Column("num_sequences", sa.Integer(), nullable=False, server_default=sa.text("1")))


def downgrade() -> None:
    op.drop_column("operation", "num_sequences")
