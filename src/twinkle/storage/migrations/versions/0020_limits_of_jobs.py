"""How many jobs a tenant may have and run, how many members of a sweep run at once, and indexes to ask about both."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_PARTIAL_INDEXES = (
    ("job_open", ["tenant"], "finished_at IS NULL"),
    ("job_handed_out", ["nudged_at"], "state IN ('queued', 'retrying') AND nudged_at > 0"),
)


def upgrade() -> None:
    for column in ("max_jobs", "max_running_jobs"):
        op.add_column("tenant", sa.Column(column, sa.Integer(), nullable=True))
    op.add_column("job", sa.Column("at_once", sa.Integer(), nullable=True))
    for name, columns, where in _PARTIAL_INDEXES:
        op.create_index(name, "job", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def downgrade() -> None:
    for name, _, _ in _PARTIAL_INDEXES:
        op.drop_index(name, "job")
    op.drop_column("job", "at_once")
    for column in ("max_jobs", "max_running_jobs"):
        op.drop_column("tenant", column)
