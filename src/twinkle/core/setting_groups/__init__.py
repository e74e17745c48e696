"""All settings by what they are about, and what every group of them is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SettingsGroup(BaseModel):
    """Settings that belong together; their names are those of the whole tree, so no two groups share one."""

    model_config = ConfigDict(extra="forbid", frozen=True)
