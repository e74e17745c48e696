"""How clients of the official SDK are told to behave. A flag that is not set stays at the SDK's own default.

Flags that need something of the service (one poll for many samples, and the like) have settings of their own.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ClientFlags(BaseModel):
    """The SDK's words, as ``client/config`` and ``client/dynamic_config`` have them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # For a client's lifetime.
    parallel_fwdbwd_chunks: bool | None = None
    proto_compress_fwdbwd: bool | None = None
    fwdbwd_max_chunk_len: int | None = Field(default=None, gt=0)
    fwdbwd_max_chunk_bytes_count: int | None = Field(default=None, gt=0)
    fwdbwd_dispatch_bytes_semaphore_size: int | None = Field(default=None, gt=0)
    sample_dispatch_bytes_semaphore_size: int | None = Field(default=None, gt=0)
    inflight_response_bytes_semaphore_size: int | None = Field(default=None, gt=0)
    sample_max_concurrent_requests: int | None = Field(default=None, gt=0)
    sample_no_retries: bool | None = None
    sample_enable_stuck_detection: bool | None = None
    use_pyqwest_transport: bool | None = None
    billing_exception_max_pause_duration_sec: int | None = Field(default=None, ge=0)

    # Asked for again every so often.
    refresh_interval_sec: int | None = Field(default=None, gt=0)
    sample_cancel_enabled: bool | None = None
    sample_cancel_max_batch_size: int | None = Field(default=None, gt=0)
