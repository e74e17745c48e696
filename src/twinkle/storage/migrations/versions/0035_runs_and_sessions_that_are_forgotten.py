"""Runs, data sets and sampling sessions go when they ended long ago: what tells whatever comes for them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gone_lane",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("tenant", sa.String(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("session", sa.String(), nullable=False),
    )
    op.create_index("gone_lane_of_session", "gone_lane", ["session"])
    for name in ("session", "base_model"):
        op.add_column("past_checkpoint", sa.Column(name, sa.String(), nullable=False, server_default=sa.text("''")))
    is_postgres = op.get_bind().dialect.name == "postgresql"
    base_model = "a.config::json ->> 'base_model'" if is_postgres else "json_extract(a.config, '$.base_model')"
    op.execute(
        "UPDATE past_checkpoint SET"
        " session = COALESCE((SELECT a.session FROM adapter a WHERE a.id = past_checkpoint.adapter), ''),"
        f" base_model = COALESCE((SELECT {base_model} FROM adapter a WHERE a.id = past_checkpoint.adapter), '')"
    )
    op.create_index("past_checkpoint_of_session", "past_checkpoint", ["session"])
    op.create_index("past_checkpoint_of_path", "past_checkpoint", ["path", "ended_at"])
    op.create_index("past_checkpoint_end", "past_checkpoint", ["ended_at"])
    op.create_index("past_work_of_session", "past_work", ["session"])
    op.create_index("ephemeral_weights_adapter", "ephemeral_weights", ["adapter"])
    op.create_index("access_token_adapter", "access_token", ["adapter"])
    op.create_index("file_content_end", "file_content", ["ended_at"])


def downgrade() -> None:
    op.drop_index("file_content_end", table_name="file_content")
    op.drop_index("access_token_adapter", table_name="access_token")
    op.drop_index("ephemeral_weights_adapter", table_name="ephemeral_weights")
    op.drop_index("past_work_of_session", table_name="past_work")
    for name in ("past_checkpoint_end", "past_checkpoint_of_path", "past_checkpoint_of_session"):
        op.drop_index(name, table_name="past_checkpoint")
    op.drop_column("past_checkpoint", "base_model")
    op.drop_column("past_checkpoint", "session")
    op.drop_index("gone_lane_of_session", table_name="gone_lane")
    op.drop_table("gone_lane")
