"""What jobs workers run: jobs, scripts of tenants, and the data sets of clients."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from twinkle.core.addresses import parse_networks
from twinkle.core.setting_groups import SettingsGroup


class JobSettings(SettingsGroup):
    """Jobs, and the scripts of tenants that run as jobs, which are no sandbox."""

    job_concurrency: int = Field(default=8, gt=0, description="jobs that one jobs worker runs at once")
    webhook_networks: list[str] = Field(
        default=[],
        description="networks beside the public internet that jobs may notify, like"
        ' ["10.1.0.0/16"]; nothing else private is ever called',
    )
    job_lease_s: float = Field(
        default=30.0, gt=0, description="how long a job stays with a jobs worker that nothing is heard of"
    )
    job_pause_ttl_s: float = Field(
        default=90 * 24 * 3600.0, gt=0, description="how long a job may be paused; then it is cancelled"
    )
    job_retention_s: float = Field(
        default=30 * 24 * 3600.0, gt=0, description="how long a job that has ended is shown, with what happened in it"
    )

    # Scripts.
    script_tenants: list[str] = Field(
        default=[], description='names of tenants whose scripts may run, like ["alice"]; ["*"]: everybody\'s'
    )
    script_user: str = Field(
        default="",
        description="the system user that they run as, which needs a jobs worker that is root; same: as that worker",
    )
    script_folder: str = Field(
        default="", description="where each has its folder; that user must be able to reach it; default: in home"
    )
    script_python: str = Field(
        default="", description="the Python that runs them, which that user must be able to read; default: our own"
    )
    script_server_url: str = Field(
        default="", description="the API as they reach it; default: public_url, or else host and port"
    )
    script_wall_s: float = Field(default=24 * 3600.0, gt=0, description="how long one may run")
    script_cpu_s: int = Field(default=24 * 3600, gt=0, description="processor time of each of its processes")
    script_memory_bytes: int = Field(default=4 * 2**30, gt=0, description="address space of each of its processes")
    script_file_bytes: int = Field(default=2**30, gt=0, description="the largest file that it may write")
    script_folder_bytes: int = Field(default=4 * 2**30, gt=0, description="its folder; beyond it the script is ended")
    script_processes: int = Field(default=256, gt=0, description="processes and threads of that user")

    @field_validator("webhook_networks")
    @classmethod
    def _know_networks(cls, networks: list[str]) -> list[str]:
        parse_networks(networks)
        return networks


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
