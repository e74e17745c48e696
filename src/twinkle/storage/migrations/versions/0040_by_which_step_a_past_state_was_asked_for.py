"""By which step of the optimizer a fork or a rewind was asked for: a resend of it begins where the first one did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("branch", sa.Column("step", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("branch", "step")
