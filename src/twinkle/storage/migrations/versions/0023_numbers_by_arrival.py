"""Lanes whose operations the journal numbers, requests and adapters that their clients name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_NAMED = sa.text("request_key IS NOT NULL")


def upgrade() -> None:
    op.add_column("lane", sa.Column("arrival_numbered", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("operation", sa.Column("request_key", sa.String(), nullable=True))
    op.create_index(
        "operation_named",
        "operation",
        ["lane", "request_key"],
        unique=True,
        sqlite_where=_NAMED,
        postgresql_where=_NAMED,
    )
    op.create_table(
        "named_adapter",
        sa.Column("session", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["session"], ["session.id"]),
        sa.ForeignKeyConstraint(["adapter"], ["adapter.id"]),
        sa.PrimaryKeyConstraint("session", "name"),
        sa.UniqueConstraint("adapter"),
    )


def downgrade() -> None:
    op.drop_table("named_adapter")
    op.drop_index("operation_named", "operation")
    op.drop_column("operation", "request_key")
    op.drop_column("lane", "arrival_numbered")
