"""How far the owner of a job was told what happened in it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_ZERO = sa.text("0")
_IS_UNTOLD = sa.text("notify_url IS NOT NULL AND told_number < num_events")


def upgrade() -> None:
    op.add_column("job", sa.Column("told_number", sa.Integer(), server_default=_ZERO, nullable=False))
    op.add_column("job", sa.Column("tell_at", sa.Float(), server_default=_ZERO, nullable=False))
    op.add_column("job", sa.Column("num_refusals", sa.Integer(), server_default=_ZERO, nullable=False))
    op.create_index("job_untold", "job", ["tell_at"], sqlite_where=_IS_UNTOLD, postgresql_where=_IS_UNTOLD)


def downgrade() -> None:
    op.drop_index("job_untold", "job")
    for column in ("num_refusals", "tell_at", "told_number"):
        op.drop_column("job", column)
