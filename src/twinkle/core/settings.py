"""All settings, read once at process entry from ``TWINKLE_*`` variables and passed down by group."""

from __future__ import annotations

import difflib
import json
import os

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from twinkle.core.errors import ConfigError
from twinkle.core.process.foreign_settings import FOREIGN_SETTINGS
from twinkle.core.setting_groups.api import ApiSettings, DoorSettings
from twinkle.core.setting_groups.jobs import JobSettings, ProcessorSettings
from twinkle.core.setting_groups.keeping import FileSettings, KeepingSettings
from twinkle.core.setting_groups.operations import OperationSettings
from twinkle.core.setting_groups.places import HubServiceSettings, PlaceSettings, WatchingSettings
from twinkle.core.setting_groups.tenants import TenantSettings
from twinkle.core.setting_groups.worker import WorkerSettings

_CLIENT_VARIABLES = {"TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN", "TWINKLE_MODEL_ID", "TWINKLE_JOB_ID"}

SAME_USER = "same"
"""In the place of a user's name: scripts run as the jobs worker itself."""


class Settings(
    WatchingSettings,
    JobSettings,
    ProcessorSettings,
    KeepingSettings,
    HubServiceSettings,
    WorkerSettings,
    FileSettings,
    OperationSettings,
    TenantSettings,
    DoorSettings,
    ApiSettings,
    PlaceSettings,
    BaseSettings,
):
    """One tree for every process; each reads what it needs. Its fields stand in the order of the groups, last first."""

    model_config = SettingsConfigDict(env_prefix="TWINKLE_", extra="forbid", frozen=True)


def load_settings(**overrides: object) -> Settings:
    """Read the environment; flags given by name win.

    Raises:
        ConfigError: A value is wrong, or a ``TWINKLE_*`` variable is unknown (with the nearest known name).
    """
    known = {f"TWINKLE_{name.upper()}" for name in Settings.model_fields} | _CLIENT_VARIABLES | set(FOREIGN_SETTINGS)
    for name in os.environ:
        if name.startswith("TWINKLE_") and name not in known and not name.startswith("TWINKLE_TEST_"):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown setting {name}{hint}")
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        told = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"TWINKLE_{field.upper()}: {told}") from error


def environment_of(settings: Settings) -> dict[str, str]:
    """The ``TWINKLE_*`` variables under which a child process reads the same settings."""
    variables = {}
    for name in sorted(settings.model_fields_set):
        value = getattr(settings, name)
        variables[f"TWINKLE_{name.upper()}"] = _text_of(value)
    return variables


def _text_of(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return value.model_dump_json(exclude_none=True)
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
