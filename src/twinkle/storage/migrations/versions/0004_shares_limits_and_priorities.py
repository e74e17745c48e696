"""Tenants have shares of meshes and limits, adapters have priorities."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_ZERO = sa.text("0")
_READY = sa.text("head_kind IS NOT NULL")
_SAMPLES = sa.text("kind = 'sample' AND state IN ('queued', 'running')")
_LIMITS = {
    "max_adapters": sa.Integer(),
    "max_running": sa.Integer(),
    "max_samples": sa.Integer(),
    "max_body_bytes": sa.BigInteger(),
    "tokens_per_minute": sa.BigInteger(),
}


def upgrade() -> None:
    for name, kind in _LIMITS.items():
        op.add_column("tenant", sa.Column(name, kind, nullable=True))
    op.add_column("tenant", sa.Column("paid_until", sa.Float(), server_default=_ZERO, nullable=False))
    op.create_table(
        "share",
        sa.Column("mesh", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("vtime", sa.Float(), server_default=_ZERO, nullable=False),
        sa.Column("lane_vtime", sa.Float(), server_default=_ZERO, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("mesh", "tenant"),
    )
    op.execute("INSERT INTO share (mesh, tenant) SELECT DISTINCT mesh, tenant FROM lane")
    op.add_column("lane", sa.Column("nice", sa.Integer(), server_default=_ZERO, nullable=False))
    _index("lane_ready", "lane", ["mesh", "tenant", "nice", "vtime", "id"], _READY)
    _index("sample_waiting", "operation", ["mesh", "lane", "accepted_at"], _SAMPLES)


def downgrade() -> None:
    _index("sample_waiting", "operation", ["mesh", "accepted_at"], _SAMPLES)
    _index("lane_ready", "lane", ["mesh", "vtime"], _READY)
    op.drop_column("lane", "nice")
    op.drop_table("share")
    for name in (*_LIMITS, "paid_until"):
        op.drop_column("tenant", name)


def _index(name: str, table: str, columns: list[str], where: sa.TextClause) -> None:
    """Put another index in the place of the one of this name."""
    op.drop_index(name, table)
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
