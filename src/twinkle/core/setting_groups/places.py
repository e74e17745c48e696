"""What a service stands on and is seen by: database, broker, blobs, hubs, logs, Flower."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import DEFAULT_HUBS, parse_hubs
from twinkle.core.setting_groups import SettingsGroup

_SCHEMES: Mapping[str, tuple[str, ...]] = {
    "database_url": ("sqlite", "postgresql", "postgres"),
    "redis_url": ("redis", "rediss"),
    "object_store": ("file", "s3", "gs", "az", "abfs", "abfss"),
}
"""What the URLs of other services begin with."""
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


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


class HubServiceSettings(SettingsGroup):
    """Where models come from."""

    hubs: str = Field(
        default=DEFAULT_HUBS, description="where an id without ms:// or hf:// is looked for, first to last"
    )
    offline: bool = Field(default=False, description="look at the hubs' caches alone")
    forbid_hf: bool = Field(default=False, description="leave Hugging Face out")
    model_id_aliases: dict[str, str] = Field(
        default={}, description='what stands for an id, for mirrors and tests, like {"org/name": "/a/folder"}'
    )
    trust_remote_code: str = Field(
        default="0",
        description="whose code may run: ids with a revision and folders, like ms://org/plugin@v1.2,/srv/plugin",
    )

    @field_validator("hubs")
    @classmethod
    def _know_hubs(cls, hubs: str) -> str:
        try:
            parse_hubs(hubs)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return hubs


class WatchingSettings(SettingsGroup):
    """What operators see: logs and Flower."""

    flower_host: str = "127.0.0.1"
    flower_port: int = Field(default=5555, ge=0, le=65535)
    flower_user: str = "twinkle"
    flower_password: SecretStr = SecretStr("")
    log_level: str = "INFO"
    log_json: bool = False

    @field_validator("log_level")
    @classmethod
    def _know_level(cls, level: str) -> str:
        if level.upper() not in _LOG_LEVELS:
            raise ValueError(f"must be one of {', '.join(_LOG_LEVELS)}")
        return level.upper()
