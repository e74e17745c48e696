"""Alembic's scripts: the schema's history."""
