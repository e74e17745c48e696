"""The table of processors: data sets and loaders that clients have here."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Index, Text, text
from sqlmodel import Field, SQLModel


class ProcessorRow(SQLModel, table=True):
    """What a processor is, and the recipe it is rebuilt by: that of its state after operation ``applied_seq``."""

    __tablename__ = "processor"
    __table_args__ = (
        Index(
            "processor_live",
            "tenant",
            "used_at",
            sqlite_where=text("ended_at IS NULL"),
            postgresql_where=text("ended_at IS NULL"),
        ),
    )
    id: str = Field(primary_key=True, foreign_key="lane.id")
    tenant: str = Field(foreign_key="tenant.id")
    session: str = Field(foreign_key="session.id")
    processor_type: str
    class_type: str
    recipe: str | None = Field(default=None, sa_type=Text)
    applied_seq: int = Field(default=-1, sa_type=BigInteger, sa_column_kwargs={"server_default": text("-1")})
    created_at: float = Field(sa_type=Float)
    used_at: float = Field(sa_type=Float)
    ended_at: float | None = Field(default=None, sa_type=Float)
