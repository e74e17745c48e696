"""What a tenant may use; `twinkle tenants set` gives one limits of its own."""

from __future__ import annotations

from pydantic import Field

from twinkle.core.limits import TenantLimits
from twinkle.core.setting_groups import SettingsGroup


class TenantSettings(SettingsGroup):
    """What a tenant may use; `twinkle tenants set` gives one limits of its own."""

    tenant_max_adapters: int = Field(
        default=1000, ge=0, description="adapters of live sessions, per tenant; 0: no limit; more is an error"
    )
    tenant_max_running: int = Field(
        default=0,
        ge=0,
        description="operations, of samples their sequences, that run at once on one mesh, per tenant; 0: no limit; the"
        " rest waits",
    )
    max_outstanding_samples: int = Field(
        default=4000, gt=0, description="that wait or run, per tenant; more is answered 429"
    )
    tenant_max_body_bytes: int = Field(
        default=256 * 2**20,
        ge=0,
        description="request bodies and results held at once, per tenant; 0: no limit; more is answered 429",
    )
    tenant_max_requests: int = Field(
        default=8000,
        ge=0,
        description="requests in progress at once, held polls among them, per tenant and API process; 0: no limit;"
        " more is answered 429",
    )
    tenant_max_files_bytes: int = Field(
        default=100 * 2**30,
        ge=0,
        description="files, unfinished uploads and prepared rows, per tenant; 0: no limit; more is an error",
    )
    tenant_max_jobs: int = Field(
        default=5000, ge=0, description="jobs that have not ended, per tenant; 0: no limit; more is an error"
    )
    tenant_max_running_jobs: int = Field(
        default=16, ge=0, description="jobs that run at once, per tenant; 0: no limit; the rest waits"
    )
    tenant_tokens_per_minute: int = Field(
        default=0,
        ge=0,
        description="tokens trained and sampled, per tenant; 0: no limit; beyond it training waits, samples get 429",
    )
    tenant_max_processors: int = Field(
        default=20,
        ge=0,
        description="data sets and loaders of live sessions, per tenant; 0: no limit; more is an error",
    )

    tenant_max_sessions: int = Field(
        default=20_000, ge=0, description="sessions kept, ended ones too, per tenant; 0: no limit; more is an error"
    )
    tenant_max_runs: int = Field(
        default=20_000,
        ge=0,
        description="training runs, and copies of checkpoints, per tenant; 0: no limit; more is an error",
    )
    tenant_max_sampling_sessions: int = Field(
        default=100_000,
        ge=0,
        description="sampling sessions kept, per tenant; 0: no limit; more is an error",
    )
    tenant_max_queued: int = Field(
        default=20_000,
        ge=0,
        description="operations that wait or run, per tenant; 0: no limit; more is answered 429",
    )
    tenant_max_queued_bytes: int = Field(
        default=16 * 2**30,
        ge=0,
        description="what such operations were sent with, per tenant; 0: no limit; more is answered 429",
    )
    tenant_max_checkpoints: int = Field(
        default=20_000, ge=0, description="checkpoints that have not expired, per tenant; 0: no limit; more is an error"
    )
    tenant_max_checkpoint_bytes: int = Field(
        default=2**40,
        ge=0,
        description="bytes of such checkpoints, per tenant; 0: no limit; beyond it no more are saved",
    )
    tenant_max_kept_bytes: int = Field(
        default=2**40,
        ge=0,
        description="bytes of runs' recovery points, and of payloads that are kept, per tenant; 0: no limit; beyond it"
        " nothing more is trained, sampled or called",
    )

    @property
    def tenant_limits(self) -> TenantLimits:
        """The limits of tenants that have none of their own."""
        return TenantLimits(
            max_adapters=self.tenant_max_adapters,
            max_running=self.tenant_max_running,
            max_samples=self.max_outstanding_samples,
            max_body_bytes=self.tenant_max_body_bytes,
            max_files_bytes=self.tenant_max_files_bytes,
            max_jobs=self.tenant_max_jobs,
            max_running_jobs=self.tenant_max_running_jobs,
            tokens_per_minute=self.tenant_tokens_per_minute,
            max_sessions=self.tenant_max_sessions,
            max_runs=self.tenant_max_runs,
            max_sampling_sessions=self.tenant_max_sampling_sessions,
            max_queued=self.tenant_max_queued,
            max_queued_bytes=self.tenant_max_queued_bytes,
            max_checkpoints=self.tenant_max_checkpoints,
            max_checkpoint_bytes=self.tenant_max_checkpoint_bytes,
            max_kept_bytes=self.tenant_max_kept_bytes,
        )
