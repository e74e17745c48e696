"""How many sampling sessions a tenant may keep, and an index by which they are counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant", sa.Column("max_sampling_sessions", sa.Integer(), nullable=True))
    op.create_index("ix_sampling_session_tenant", "sampling_session", ["tenant"])


def downgrade() -> None:
    op.drop_index("ix_sampling_session_tenant", "sampling_session")
    op.drop_column("tenant", "max_sampling_sessions")
