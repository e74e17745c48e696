"""The schema. SQLModel owns it, Alembic changes it; the hot tables are spoken to in plain SQL.

Times are Unix seconds (float). Structured columns are JSON text, written and read through pydantic models.
"""

from __future__ import annotations

from twinkle.storage.tables.artifacts import (
    AccessTokenRow,
    AdapterRow,
    CheckpointRow,
    DoomedBlobRow,
    EphemeralWeightsRow,
    NamedAdapterRow,
    PastCheckpointRow,
    PushRow,
    SamplerTemplateRow,
    SamplingSessionRow,
    SnapshotRow,
)
from twinkle.storage.tables.files import (
    FileContentRow,
    FilePieceRow,
    FileRow,
    PreparedDataRow,
    UploadPartRow,
    UploadRow,
)
from twinkle.storage.tables.jobs import JobAttemptRow, JobDependencyRow, JobEventRow, JobRow
from twinkle.storage.tables.processors import ProcessorRow
from twinkle.storage.tables.queue import (
    BranchRow,
    ForgottenRow,
    GoneLaneRow,
    LaneRow,
    MeshRow,
    OperationRow,
    PastStepsRow,
    ShareRow,
)
from twinkle.storage.tables.tenants import (
    ApiKeyRow,
    AuditFloorRow,
    AuditRow,
    PastWorkRow,
    SessionRow,
    SharedSecretRow,
    TenantRow,
)

__all__ = [
    "AccessTokenRow",
    "AdapterRow",
    "ApiKeyRow",
    "AuditFloorRow",
    "AuditRow",
    "BranchRow",
    "CheckpointRow",
    "DoomedBlobRow",
    "EphemeralWeightsRow",
    "FileContentRow",
    "FilePieceRow",
    "FileRow",
    "ForgottenRow",
    "GoneLaneRow",
    "JobAttemptRow",
    "JobDependencyRow",
    "JobEventRow",
    "JobRow",
    "LaneRow",
    "MeshRow",
    "NamedAdapterRow",
    "OperationRow",
    "PastCheckpointRow",
    "PastStepsRow",
    "PastWorkRow",
    "PreparedDataRow",
    "ProcessorRow",
    "PushRow",
    "SamplerTemplateRow",
    "SamplingSessionRow",
    "SessionRow",
    "ShareRow",
    "SharedSecretRow",
    "SnapshotRow",
    "TenantRow",
    "UploadPartRow",
    "UploadRow",
]
