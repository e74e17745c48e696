"""Jobs, what happened in them, the attempts at them, their dependencies; and the session that a job works in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_PARTIAL_INDEXES = (
    ("job_of_parent", ["parent", "created_at", "id"], "parent IS NOT NULL"),
    ("job_ready", ["tenant", "nice", "created_at"], "state IN ('queued', 'retrying')"),
    ("job_running", ["lease_until"], "state = 'running'"),
    ("job_settled", ["id"], "state = 'waiting' AND (num_needs = 0 OR broken_need IS NOT NULL)"),
    ("job_paused", ["paused_at"], "state = 'paused'"),
    ("job_ended", ["finished_at"], "finished_at IS NOT NULL"),
    ("job_holds", ["id"], "holds AND finished_at IS NOT NULL"),
)
_KEPT = "finished_at IS NOT NULL AND NOT expired"


def upgrade() -> None:
    _create_job()
    op.create_table(
        "job_event",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["job.id"]),
        sa.PrimaryKeyConstraint("job", "number"),
    )
    op.create_table(
        "job_attempt",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["job.id"]),
        sa.PrimaryKeyConstraint("job", "attempt"),
    )
    op.create_table(
        "job_dependency",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("needs", sa.String(), nullable=False),
        sa.Column("condition", sa.String(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["job.id"]),
        sa.PrimaryKeyConstraint("job", "needs"),
    )
    op.create_index("ix_job_dependency_needs", "job_dependency", ["needs"])
    op.add_column("session", sa.Column("job", sa.String(), nullable=True))
    op.create_index("ix_session_job", "session", ["job"], unique=True)
    op.add_column("operation", sa.Column("held_by", sa.String(), nullable=True))
    _index("operation_held", "operation", ["held_by"], "held_by IS NOT NULL")
    op.drop_index("operation_kept", "operation")
    _index("operation_kept", "operation", ["finished_at"], f"{_KEPT} AND held_by IS NULL")


def _create_job() -> None:
    op.create_table(
        "job",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("client_id", sa.String(), nullable=True),
        sa.Column("name", sa.String(), nullable=True),
        sa.Column("parent", sa.String(), nullable=True),
        sa.Column("nice", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("notify_url", sa.Text(), nullable=True),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=True),
        sa.Column("progress", sa.Text(), nullable=False),
        sa.Column("saved", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("best_done", sa.Float(), nullable=False),
        sa.Column("num_events", sa.Integer(), nullable=False),
        sa.Column("num_needs", sa.Integer(), nullable=False),
        sa.Column("broken_need", sa.String(), nullable=True),
        sa.Column("holds", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=False),
        sa.Column("not_before", sa.Float(), nullable=False),
        sa.Column("nudged_at", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("paused_at", sa.Float(), nullable=True),
        sa.Column("cancel_requested_at", sa.Float(), nullable=True),
        sa.Column("pause_requested_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant", "client_id"),
    )
    op.create_index("job_of_tenant", "job", ["tenant", "created_at", "id"])
    for name, columns, where in _PARTIAL_INDEXES:
        _index(name, "job", columns, where)


def _index(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def downgrade() -> None:
    op.drop_index("operation_kept", "operation")
    _index("operation_kept", "operation", ["finished_at"], _KEPT)
    op.drop_index("operation_held", "operation")
    op.drop_column("operation", "held_by")
    op.drop_index("ix_session_job", "session")
    op.drop_column("session", "job")
    for table in ("job_dependency", "job_attempt", "job_event", "job"):
        op.drop_table(table)
