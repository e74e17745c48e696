"""What payloads in the journal come to after the end of their operations, and up to which of them that is counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("lane", sa.Column("kept_bytes", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("lane", sa.Column("counted_no", sa.BigInteger(), nullable=False, server_default=sa.text("-1")))
    op.create_index(
        "lane_keeping",
        "lane",
        ["tenant", "kept_bytes"],
        sqlite_where=sa.text("kept_bytes > 0"),
        postgresql_where=sa.text("kept_bytes > 0"),
    )


def downgrade() -> None:
    op.drop_index("lane_keeping", table_name="lane")
    op.drop_column("lane", "counted_no")
    op.drop_column("lane", "kept_bytes")
