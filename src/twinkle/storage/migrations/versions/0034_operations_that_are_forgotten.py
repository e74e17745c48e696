"""Rows of ended operations go: what stays of them, and what tells a resend of one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

_IS_FORGETTABLE = sa.text("pruned_seq > gone_seq + 1")
_IS_FORGETTABLE_SAMPLE = sa.text("kind = 'sample' AND expired")

_HAS_BLOB = sa.text("payload_blob IS NOT NULL")


def upgrade() -> None:
    op.add_column("lane", sa.Column("gone_seq", sa.BigInteger(), nullable=False, server_default=sa.text("-1")))
    op.create_index("lane_forgettable", "lane", ["id"], sqlite_where=_IS_FORGETTABLE, postgresql_where=_IS_FORGETTABLE)
    op.create_index(
        "sample_forgettable",
        "operation",
        ["finished_at"],
        sqlite_where=_IS_FORGETTABLE_SAMPLE,
        postgresql_where=_IS_FORGETTABLE_SAMPLE,
    )
    op.create_table(
        "forgotten",
        sa.Column("lane", sa.String(), sa.ForeignKey("lane.id"), primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "past_steps",
        sa.Column("lane", sa.String(), sa.ForeignKey("lane.id"), primary_key=True),
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "past_work",
        sa.Column("tenant", sa.String(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("hour", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("session", sa.String(), primary_key=True),
        sa.Column("base_model", sa.String(), primary_key=True),
        sa.Column("kind", sa.String(), primary_key=True),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("device_s", sa.Float(), nullable=False),
        sa.Column("num_operations", sa.BigInteger(), nullable=False),
    )
    op.create_index("past_work_by_hour", "past_work", ["hour"])
    op.add_column("tenant", sa.Column("max_kept_bytes", sa.BigInteger(), nullable=True))
    op.create_index("adapter_of_tenant", "adapter", ["tenant", "created_at", "id"])
    op.drop_index("checkpoint_of_tenant", table_name="checkpoint")
    op.create_index("checkpoint_of_tenant", "checkpoint", ["tenant", "created_at", "path"])
    op.create_index("snapshot_size", "snapshot", ["adapter", "size_bytes"])
    op.create_index(
        "operation_payload_size",
        "operation",
        ["tenant", "payload_bytes"],
        sqlite_where=_HAS_BLOB,
        postgresql_where=_HAS_BLOB,
    )
    # Nothing is rebuilt of data sets and loaders that have ended.
    op.execute(
        "UPDATE lane SET floor_seq = max_seq, pruned_seq = max_seq"
        " WHERE id IN (SELECT id FROM processor WHERE ended_at IS NOT NULL)"
    )


def downgrade() -> None:
    op.drop_index("operation_payload_size", table_name="operation")
    op.drop_index("snapshot_size", table_name="snapshot")
    op.drop_index("checkpoint_of_tenant", table_name="checkpoint")
    op.create_index("checkpoint_of_tenant", "checkpoint", ["tenant", "created_at"])
    op.drop_index("adapter_of_tenant", table_name="adapter")
    op.drop_column("tenant", "max_kept_bytes")
    op.drop_index("past_work_by_hour", table_name="past_work")
    op.drop_table("past_work")
    op.drop_table("past_steps")
    op.drop_table("forgotten")
    op.drop_index("sample_forgettable", table_name="operation")
    op.drop_index("lane_forgettable", table_name="lane")
    op.drop_column("lane", "gone_seq")
