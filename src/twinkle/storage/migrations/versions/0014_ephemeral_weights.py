"""Nameless weights have an owner and an end, and are no checkpoints any more; those that are end within a day."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_DAY_S = 86_400.0
_IS_OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "ephemeral_weights",
        sa.Column("sampling_session", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("session", sa.String(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("pinned", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(["sampling_session"], ["sampling_session.id"]),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.ForeignKeyConstraint(["session"], ["session.id"]),
        sa.ForeignKeyConstraint(["adapter"], ["adapter.id"]),
        sa.PrimaryKeyConstraint("sampling_session"),
    )
    for name, columns in (("ephemeral_of_adapter", ["adapter", "seq"]), ("ephemeral_of_session", ["session"])):
        op.create_index(name, "ephemeral_weights", columns, sqlite_where=_IS_OPEN, postgresql_where=_IS_OPEN)
    op.create_index(
        "ephemeral_pinned",
        "ephemeral_weights",
        ["adapter"],
        sqlite_where=sa.text("pinned"),
        postgresql_where=sa.text("pinned"),
    )
    op.create_index("ephemeral_of_tenant", "ephemeral_weights", ["tenant", "opened_at"])
    statement = sa.text("UPDATE checkpoint SET expires_at = :then WHERE NOT listed AND expires_at IS NULL")
    op.execute(statement.bindparams(then=time.time() + _DAY_S))


def downgrade() -> None:
    op.drop_table("ephemeral_weights")
