"""Whether anything refers to a blob is found by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in ("payload_blob", "result_blob"):
        present = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"operation_{column}", "operation", [column], sqlite_where=present, postgresql_where=present)
    op.create_index("snapshot_blob", "snapshot", ["blob"])


def downgrade() -> None:
    op.drop_index("snapshot_blob", "snapshot")
    op.drop_index("operation_result_blob", "operation")
    op.drop_index("operation_payload_blob", "operation")
