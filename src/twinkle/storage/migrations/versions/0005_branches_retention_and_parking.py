"""Runs can be forked and rewound, are kept for a stated time, and are parked when their client has gone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ZERO = sa.text("0")
_BEFORE_ALL = sa.text("-1")


def upgrade() -> None:
    op.add_column("operation", sa.Column("payload_bytes", sa.BigInteger(), server_default=_ZERO, nullable=False))
    op.execute("UPDATE operation SET payload_bytes = LENGTH(payload) WHERE payload IS NOT NULL")
    for name in ("floor_seq", "pruned_seq"):
        op.add_column("lane", sa.Column(name, sa.BigInteger(), server_default=_BEFORE_ALL, nullable=False))
    op.add_column("lane", sa.Column("num_rewinds", sa.Integer(), server_default=_ZERO, nullable=False))
    op.add_column("adapter", sa.Column("parked_at", sa.Float(), nullable=True))
    op.add_column("snapshot", sa.Column("is_start", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_index("snapshot_age", "snapshot", ["created_at"])
    op.create_table(
        "branch",
        sa.Column("adapter", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("request_key", sa.String(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapter.id"]),
        sa.ForeignKeyConstraint(["source"], ["adapter.id"]),
        sa.PrimaryKeyConstraint("adapter", "seq"),
        sa.UniqueConstraint("source", "request_key"),
    )
    op.create_table(
        "doomed_blob",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index("doomed_blob_since", "doomed_blob", ["since"])


def downgrade() -> None:
    op.drop_table("doomed_blob")
    op.drop_table("branch")
    op.drop_index("snapshot_age", "snapshot")
    op.drop_column("snapshot", "is_start")
    op.drop_column("adapter", "parked_at")
    for name in ("num_rewinds", "pruned_seq", "floor_seq"):
        op.drop_column("lane", name)
    op.drop_column("operation", "payload_bytes")
