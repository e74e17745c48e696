"""Where the truth, the broker and the blobs are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from twinkle.core.setting_groups.group import SettingsGroup

_SCHEMES: Mapping[str, tuple[str, ...]] = {
    "database_url": ("sqlite", "postgresql", "postgres"),
    "redis_url": ("redis", "rediss"),
    "object_store": ("file", "s3", "gs", "az", "abfs", "abfss"),
}
"""What the URLs of other services begin with."""


class PlaceSettings(SettingsGroup):
    """Where the truth, the broker and the blobs are."""

    home: Path = Field(
        default=Path(".twinkle"), description="folder of the embedded stack: journal, objects, logs, keys"
    )
    database_url: str = Field(default="", description="sqlite:///path or postgresql://...; default in home")
    redis_url: SecretStr = Field(default=SecretStr(""), description="redis://... or rediss://...; broker and wake-ups")
    object_store: str = Field(
        default="", description="a folder, s3:// or az:// URL (gs:// is untested); default in home"
    )

    @field_validator("database_url", "redis_url", "object_store")
    @classmethod
    def _know_scheme(cls, value: str | SecretStr, info: ValidationInfo) -> str | SecretStr:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        scheme, separator, _ = text.partition("://")
        known = _SCHEMES[info.field_name or ""]
        if not text or (not separator and info.field_name == "object_store"):
            return value
        if not separator or scheme not in known:
            raise ValueError(f"must begin with one of {', '.join(f'{name}://' for name in known)}")
        return value

    @property
    def resolved_database_url(self) -> str:
        """The journal's URL, embedded default included."""
        return self.database_url or f"sqlite:///{self.journal_file}"

    @property
    def journal_file(self) -> Path:
        """Where the embedded journal is, if no other database is named."""
        return self.home.absolute() / "journal.db"

    @property
    def resolved_object_store(self) -> str:
        """The object store's URL or folder, embedded default included."""
        return self.object_store or str(self.home.absolute() / "objects")
