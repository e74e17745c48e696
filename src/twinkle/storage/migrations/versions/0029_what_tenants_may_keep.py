"""Limits of what a tenant keeps: sessions, runs, waiting operations, checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_COUNTS = ("max_sessions", "max_runs", "max_queued", "max_checkpoints")
_BYTES = ("max_queued_bytes", "max_checkpoint_bytes")


def upgrade() -> None:
    for name in _COUNTS:
        op.add_column("tenant", sa.Column(name, sa.Integer(), nullable=True))
    for name in _BYTES:
        op.add_column("tenant", sa.Column(name, sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for name in (*_BYTES, *_COUNTS):
        op.drop_column("tenant", name)
