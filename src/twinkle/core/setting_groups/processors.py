"""Processors: data sets and loaders that clients of the Twinkle dialect have here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinkle.core.setting_groups.group import SettingsGroup


class ProcessorSettings(SettingsGroup):
    """Processors: data sets and loaders that clients of the Twinkle dialect have here."""

    processors: Literal["jobs", "apart", "off"] = Field(
        default="jobs",
        description="who serves data sets and loaders over HTTP: the jobs workers, `twinkle processors` apart from"
        " them, or nobody",
    )
    processor_processes: int = Field(default=2, gt=0, description="processes that hold their rows, started when needed")
    processor_memory_bytes: int = Field(
        default=4 * 2**30, gt=0, description="what such a process may have taken; then it is begun anew"
    )
    processor_call_s: float = Field(default=600.0, gt=0, description="how long one call may take")
    processor_reward_s: float = Field(
        default=60.0, gt=0, description="how long one call of a reward may take, within processor_call_s"
    )
    processor_disk_bytes: int = Field(
        default=20 * 2**30,
        gt=0,
        description="what such a process may hold on its disk, of files that data sets are made of and of their rows;"
        " beyond it what is not in use is put away, to be made anew, and what does not fit is refused",
    )
    processor_process_idle_s: float = Field(
        default=300.0, gt=0, description="after so long without a call such a process is ended"
    )
    processor_idle_s: float = Field(
        default=6 * 3600.0, gt=0, description="how long a data set or loader stays that nothing is heard of"
    )
    processor_folders: list[str] = Field(
        default=[], description='folders of the server that clients may make data sets of, like ["/srv/data"]'
    )
