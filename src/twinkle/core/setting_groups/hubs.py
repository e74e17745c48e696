"""Where models come from."""

from __future__ import annotations

from pydantic import Field, field_validator

from twinkle.core.errors import ConfigError
from twinkle.core.hub_settings import DEFAULT_HUBS, parse_hubs
from twinkle.core.setting_groups.group import SettingsGroup


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
