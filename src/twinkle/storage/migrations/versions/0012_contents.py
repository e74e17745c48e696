"""A checkpoint's name means one content at a time, and what was given out is bound to that.

Sessions, tokens and loads of before are bound to what their names mean now: nobody can tell what they meant then.
"""

from __future__ import annotations

import json
import uuid

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_ZERO = sa.text("0")


def upgrade() -> None:
    op.add_column("checkpoint", sa.Column("content", sa.String(), nullable=True))
    op.add_column("checkpoint", sa.Column("generation", sa.Integer(), server_default=_ZERO, nullable=False))
    op.add_column("checkpoint", sa.Column("copied_from", sa.String(), nullable=True))
    op.add_column("sampling_session", sa.Column("content", sa.String(), nullable=True))
    op.add_column("sampling_session", sa.Column("generation", sa.Integer(), nullable=True))
    op.add_column("access_token", sa.Column("content", sa.String(), nullable=True))
    connection = op.get_bind()
    for (path,) in connection.execute(sa.text("SELECT path FROM checkpoint")).fetchall():
        connection.execute(
            sa.text("UPDATE checkpoint SET content = :content WHERE path = :path"),
            {"content": uuid.uuid4().hex, "path": path},
        )
    with op.batch_alter_table("checkpoint") as batch:
        batch.alter_column("content", existing_type=sa.String(), nullable=False)
    op.create_index("checkpoint_content", "checkpoint", ["content"], unique=True)
    _bind_sessions()
    _bind_tokens()
    _bind_loads(connection)


def _bind_sessions() -> None:
    """Those whose checkpoint is gone, or is a stranger's and private by now, find nothing."""
    op.execute(
        "UPDATE sampling_session SET generation = 0, content = COALESCE((SELECT c.content FROM checkpoint c"
        " WHERE c.path = sampling_session.checkpoint AND (c.public OR c.tenant = sampling_session.tenant)), 'none')"
        " WHERE checkpoint IS NOT NULL"
    )


def _bind_tokens() -> None:
    op.execute(
        "UPDATE access_token SET content = COALESCE((SELECT c.content FROM checkpoint c"
        " WHERE c.path = access_token.path AND c.seq = access_token.seq), 'none') WHERE path IS NOT NULL"
    )
    with op.batch_alter_table("access_token") as batch:
        batch.drop_column("seq")


def _bind_loads(connection: sa.Connection) -> None:
    """What was accepted and has not ended reads what its path means now, if its tenant may read that.

    But a run's loads of its own checkpoints take their turn among its saves.
    """
    waiting = connection.execute(
        sa.text(
            "SELECT request_id, tenant, lane, payload FROM operation WHERE kind = 'load_weights'"
            " AND payload IS NOT NULL AND state IN ('queued', 'running')"
        )
    ).fetchall()
    for request_id, tenant, lane, payload in waiting:
        request = json.loads(bytes(payload) or b"{}")
        found = connection.execute(
            sa.text("SELECT content, tenant, public, adapter, seq FROM checkpoint WHERE path = :path"),
            {"path": request.get("path")},
        ).fetchone()
        if found is None or found.adapter == lane:
            continue
        is_granted = _covers(request.get("grant"), found.adapter, found.seq)
        if not (found.tenant == tenant or found.public or is_granted):
            continue
        request["content"] = found.content
        if "grant" in request:
            request["grant"]["content"] = found.content
        connection.execute(
            sa.text("UPDATE operation SET payload = :payload WHERE request_id = :request_id"),
            {"payload": json.dumps(request).encode(), "request_id": request_id},
        )


def _covers(grant: dict[str, object] | None, run: str, seq: int) -> bool:
    return grant is not None and grant["run"] == run and grant.get("seq") in (None, seq)


def downgrade() -> None:
    op.add_column("access_token", sa.Column("seq", sa.Integer(), nullable=True))
    op.execute(
        "UPDATE access_token SET seq = COALESCE((SELECT c.seq FROM checkpoint c"
        " WHERE c.path = access_token.path AND c.content = access_token.content), -1) WHERE path IS NOT NULL"
    )
    op.drop_column("access_token", "content")
    op.drop_column("sampling_session", "generation")
    op.drop_column("sampling_session", "content")
    op.drop_index("checkpoint_content", "checkpoint")
    for name in ("copied_from", "generation", "content"):
        op.drop_column("checkpoint", name)
