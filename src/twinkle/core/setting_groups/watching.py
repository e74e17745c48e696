"""What operators see: logs and Flower."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from twinkle.core.setting_groups.group import SettingsGroup

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


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
