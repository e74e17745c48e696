"""Files that tenants send, and exports that leave."""

from __future__ import annotations

from pydantic import Field

from twinkle.core.setting_groups.group import SettingsGroup


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
