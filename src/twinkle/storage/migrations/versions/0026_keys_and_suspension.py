"""What a key may be used for and when it was; tenants that are suspended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("scopes", sa.String(), nullable=True))
    op.add_column("api_key", sa.Column("last_used_at", sa.Float(), nullable=True))
    op.add_column("api_key", sa.Column("is_lent", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.execute("UPDATE api_key SET is_lent = TRUE WHERE expires_at IS NOT NULL")
    op.create_index("ix_api_key_revoked_at", "api_key", ["revoked_at"])
    op.add_column("tenant", sa.Column("suspended_at", sa.Float(), nullable=True))
    op.add_column("tenant", sa.Column("suspension", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenant", "suspension")
    op.drop_column("tenant", "suspended_at")
    op.drop_index("ix_api_key_revoked_at", "api_key")
    op.drop_column("api_key", "is_lent")
    op.drop_column("api_key", "last_used_at")
    op.drop_column("api_key", "scopes")
