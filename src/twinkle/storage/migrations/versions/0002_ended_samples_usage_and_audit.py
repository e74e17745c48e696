"""ended samples are numbered, usage and audit can be told, checkpoints may share files"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SAMPLE_ENDED = sa.text("ended_no IS NOT NULL")
_DONE = sa.text("state = 'done'")


def upgrade() -> None:
    # Not in batch mode: SQLite would drop and rebuild tables that others refer to.
    op.add_column("lane", sa.Column("num_ended", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column(
        "sampling_session", sa.Column("num_clients", sa.Integer(), server_default=sa.text("1"), nullable=False)
    )
    with op.batch_alter_table("operation") as batch_op:
        # A cloned sampling client counts from a thousand million times its number on.
        batch_op.alter_column("seq", existing_type=sa.Integer(), type_=sa.BigInteger(), existing_nullable=False)
        batch_op.add_column(
            sa.Column("num_prompt_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
        )
        batch_op.add_column(sa.Column("ended_no", sa.BigInteger(), nullable=True))
    op.create_index(
        "sample_ended", "operation", ["lane", "ended_no"], sqlite_where=_SAMPLE_ENDED, postgresql_where=_SAMPLE_ENDED
    )
    op.create_index(
        "operation_used", "operation", ["tenant", "finished_at"], sqlite_where=_DONE, postgresql_where=_DONE
    )
    op.add_column("checkpoint", sa.Column("files_group", sa.String(), nullable=True))
    op.create_index(op.f("ix_checkpoint_files_group"), "checkpoint", ["files_group"])
    _create_tables()


def _create_tables() -> None:
    op.create_table(
        "past_checkpoint",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("past_checkpoint_of_tenant", "past_checkpoint", ["tenant", "ended_at"])
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("audit_of_tenant", "audit", ["tenant", "at"])
