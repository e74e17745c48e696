"""Alembic's entry: runs the migrations on the connection that ``migrating.migrate`` hands over."""

from __future__ import annotations

from alembic import context
from sqlmodel import SQLModel

from twinkle.storage import tables  # noqa: F401 - registers the tables

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=SQLModel.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
