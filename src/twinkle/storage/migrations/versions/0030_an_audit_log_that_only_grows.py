"""The audit log tells who acted, also of what belongs to no tenant, and only grows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

_SQLITE = (
    "CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit"
    " BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END",
    "CREATE TRIGGER audit_is_kept BEFORE DELETE ON audit WHEN OLD.at >= (SELECT at FROM audit_floor)"
    " BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END",
    # Else INSERT OR REPLACE would be a way round both.
    "CREATE TRIGGER audit_is_not_replaced BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id)"
    " BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END",
    "CREATE TRIGGER audit_floor_only_rises BEFORE UPDATE ON audit_floor WHEN NEW.at < OLD.at"
    " BEGIN SELECT RAISE(ABORT, 'what was forgotten does not come back'); END",
    "CREATE TRIGGER audit_floor_is_kept BEFORE DELETE ON audit_floor"
    " BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END",
)
_POSTGRES = (
    "CREATE FUNCTION refuse_to_change_audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
    " IF TG_OP = 'DELETE' AND TG_LEVEL = 'ROW' AND TG_TABLE_NAME = 'audit' THEN"
    "   IF OLD.at < (SELECT at FROM audit_floor) THEN RETURN OLD; END IF;"
    " END IF;"
    " RAISE EXCEPTION 'the audit log only grows'; END $$",
    "CREATE FUNCTION refuse_to_lower_audit_floor() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
    " IF TG_OP = 'UPDATE' AND NEW.at >= OLD.at THEN RETURN NEW; END IF;"
    " RAISE EXCEPTION 'what was forgotten does not come back'; END $$",
    "CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE ON audit"
    " FOR EACH ROW EXECUTE FUNCTION refuse_to_change_audit()",
    "CREATE TRIGGER audit_is_not_emptied BEFORE TRUNCATE ON audit"
    " FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change_audit()",
    "CREATE TRIGGER audit_floor_only_rises BEFORE UPDATE OR DELETE ON audit_floor"
    " FOR EACH ROW EXECUTE FUNCTION refuse_to_lower_audit_floor()",
)


def upgrade() -> None:
    with op.batch_alter_table("audit") as batch_op:
        batch_op.alter_column("tenant", existing_type=sa.String(), nullable=True)
        batch_op.add_column(sa.Column("actor", sa.String(), nullable=False, server_default=sa.text("'tenant'")))
    op.create_index("audit_by_time", "audit", ["at"])
    op.create_table(
        "audit_floor",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute("INSERT INTO audit_floor (id, at) VALUES (1, 0)")
    for statement in _POSTGRES if op.get_bind().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)
