"""A tenant's sessions in the order in which they are listed and searched."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("session_of_tenant", "session", ["tenant", "created_at", "id"])


def downgrade() -> None:
    op.drop_index("session_of_tenant", "session")
