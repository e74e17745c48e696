"""What is kept, files of tenants among it, for how long, and when housekeeping ends it."""

from __future__ import annotations

from pydantic import Field

from twinkle.core.setting_groups import SettingsGroup


class KeepingSettings(SettingsGroup):
    """What is kept, for how long, and when housekeeping ends it."""

    retention_s: float = Field(
        default=7 * 24 * 3600.0,
        gt=0,
        description="how long a run can be forked from or rewound to what it was, and training payloads stay for it",
    )
    keep_snapshot_every_ops: int = Field(
        default=500, gt=0, description="within that time one snapshot in so many operations is kept"
    )
    max_snapshots: int = Field(default=16, ge=2, description="snapshots kept of one run at most")
    max_ephemeral_weights: int = Field(
        default=32,
        gt=0,
        description="nameless weights that a client's session may sample from; one more ends the longest unused",
    )
    ephemeral_idle_s: float = Field(
        default=86400.0, gt=0, description="how long nameless weights stay that nobody samples from"
    )
    ephemeral_grace_s: float = Field(
        default=3600.0, ge=0, description="how long they outlive the lapse of their client's session"
    )
    session_timeout_s: float = Field(default=300.0, gt=0, description="silence after which a session has lapsed")
    stall_s: float = Field(
        default=600.0, gt=0, description="how long nothing may move on a mesh that has work before livez answers 503"
    )
    session_retention_s: float = Field(
        default=30 * 24 * 3600.0,
        gt=0,
        description="how long a session stays that has ended, or is silent, and of which nothing else is kept",
    )
    operation_retention_s: float = Field(
        default=30 * 24 * 3600.0,
        gt=0,
        description="how long the rows of ended operations stay, and of a run those that it may be rebuilt from;"
        " sent again afterwards, an operation is answered 410",
    )
    run_retention_s: float = Field(
        default=90 * 24 * 3600.0,
        gt=0,
        description="how long runs stay that were unloaded and have no checkpoints and no forks, data sets that have"
        " ended, and sampling sessions whose client or checkpoint is gone; whatever comes for them afterwards is"
        " answered 410",
    )
    usage_retention_s: float = Field(
        default=2 * 365 * 24 * 3600.0,
        gt=0,
        description="how long what forgotten operations came to is kept, by the hour, and what deleted checkpoints and"
        " files took up",
    )
    audit_retention_s: float = Field(
        default=365 * 24 * 3600.0, gt=0, description="how long the audit log is kept, saves and loads included"
    )
    disk_low_bytes: int = Field(
        default=2**30,
        ge=0,
        description="free bytes of the journal's and the objects' disks below which nothing new is begun, and 503"
        " answered; 0: never mind",
    )
    disk_critical_bytes: int = Field(
        default=256 * 2**20, ge=0, description="free bytes below which only reading and deleting go on"
    )


class FileSettings(SettingsGroup):
    """Files that tenants send, and exports that leave."""

    max_file_bytes: int = Field(default=8 * 2**30, gt=0, description="one file, in one piece or in parts")
    upload_ttl_s: float = Field(
        default=24 * 3600.0, gt=0, description="how long an unfinished upload waits for its next part"
    )
    batch_file_ttl_s: float = Field(
        default=30 * 24 * 3600.0, gt=0, description="how long files with purpose batch stay that name no end"
    )
    prepared_data_idle_s: float = Field(
        default=30 * 24 * 3600.0, gt=0, description="how long rows that were made of files stay when no job asks"
    )
    load_folders: list[str] = Field(
        default=[],
        description="folders of the server whose PEFT adapters clients may load and sample by path, like"
        ' ["/srv/adapters"]; what is named is copied when the call is accepted',
    )
    load_folder_bytes: int = Field(
        default=2**30, gt=0, description="one adapter of such a folder; larger ones are refused"
    )
    export_targets: str = Field(
        default="hf://,ms://",
        description="where exports may be sent: the beginnings of addresses, in which {tenant} stands for whose it is,"
        " like hf://,s3://team/{tenant}/,file:///srv/exports/{tenant}; downloads always may",
    )
    export_memory_bytes: int = Field(
        default=16 * 2**30, gt=0, description="what comparing an export's logits may take; larger models are refused"
    )
