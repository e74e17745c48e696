"""The API: whom it serves, how it answers, and what anybody may do at its door."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator

from twinkle.core.loopback import is_loopback
from twinkle.core.setting_groups import SettingsGroup

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", re.ASCII)
_OWN_PATHS = re.compile(r"/(api|v1)(/|$)")


class ClientFlags(BaseModel):
    """How clients of the official SDK are told to behave, in the words of ``client/config`` and its dynamic twin.

    A flag that is not set stays at the SDK's own default. Those that need something of the service (one poll for many
    samples, and the like) have settings of their own.
    """

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


class ApiSettings(SettingsGroup):
    """The API: where it listens, what it takes and what it tells clients."""

    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    max_body_bytes: int = Field(default=64 * 2**20, gt=0, description="request body after decompression")
    long_poll_s: float = Field(default=20.0, gt=0, le=30, description="how long retrieve_future holds a poll")
    poll_samples_together: bool = Field(
        default=False,
        description="tell clients to hold one poll for all samples of a sampling client, not one for each",
    )
    client_flags: ClientFlags = Field(
        default=ClientFlags(),
        description='flags of the official SDK, like {"proto_compress_fwdbwd": true}; the others stay at its defaults',
    )
    custom_loss_server_side: bool = Field(
        default=False,
        description="tell clients to upload losses made with create_custom_loss, and run them here in one pass",
    )
    jwt_auth: bool = Field(
        default=False,
        description="tell clients to exchange their API key for a short-lived JWT; `tinker auth whoami` needs it",
    )
    jwt_ttl_s: int = Field(default=900, gt=0, description="how long such a JWT stands for its key")
    max_body_bytes_in_flight: int = Field(
        default=2**30, gt=0, description="request bodies held at once, of everybody; more is answered 429"
    )
    max_result_bytes_in_flight: int = Field(
        default=2**30,
        gt=0,
        description="results held at once on their way to clients, of everybody; more is answered 429",
    )
    max_pending_submissions: int = Field(
        default=10_000, gt=0, description="operations waiting to be written to the journal; more is answered 429"
    )
    submit_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="how long a submission waits for the journal's database; then it is answered 503",
    )
    statement_timeout_s: float = Field(
        default=15.0, gt=0, description="how long one statement of the API's may take in the database; then 503"
    )
    any_key: bool = Field(
        default=False,
        description="take any key, each for a tenant of its own; for one person, on loopback only",
    )
    public_url: str = Field(
        default="",
        description="the URL under which clients reach the API, in download URLs; default: where it listens, which"
        " must be one address for that",
    )
    tell_model_folder: bool = Field(
        default=False,
        description="tell the SDK on this machine the model's folder, where it finds the tokenizer; `twinkle serve`"
        " does, unless it is 0",
    )
    root_path: str = Field(
        default="",
        description="the path of the host under which clients reach the API, like /twinkle; default: public_url's",
    )
    download_url_secret: SecretStr = Field(
        default=SecretStr(""),
        description="signs download URLs, cursors and tokens, the same for every API; default: made once in home",
    )
    download_url_ttl_s: int = Field(default=3600, gt=0, description="how long a download URL works")
    presign_downloads: bool = Field(
        default=False, description="let owners download straight from the object store, not through the API"
    )
    presigned_url_ttl_s: int = Field(
        default=900,
        gt=0,
        le=3600,
        description="how long such a URL of the object store works, which nobody can take back; at most 3600",
    )
    admin_key: SecretStr = Field(
        default=SecretStr(""), description="opens what administrators may ask, sent as X-Admin-Key; empty: nobody may"
    )

    @field_validator("root_path")
    @classmethod
    def _know_path(cls, path: str) -> str:
        if path and (not _ROOT_PATH.fullmatch(path) or _OWN_PATHS.match(path)):
            raise ValueError(
                f"must be like /twinkle: segments of letters, digits, '.', '_' and '-' that do not begin with /api or"
                f" /v1, not {path!r}"
            )
        return path

    @field_validator("any_key")
    @classmethod
    def _stay_at_home(cls, any_key: bool, info: ValidationInfo) -> bool:
        host = info.data.get("host", "")
        if any_key and not is_loopback(host):
            raise ValueError(f"it may listen on 127.0.0.1, ::1 or localhost only, not on {host}")
        return any_key

    @property
    def mounted_at(self) -> str:
        """The path under which clients reach the API; empty at the root of its host."""
        path = self.root_path or urlsplit(self.public_url).path.rstrip("/")
        return "" if _OWN_PATHS.match(path) else path


class DoorSettings(SettingsGroup):
    """What anybody may do at the API's door, before a key is looked at."""

    max_connections: int = Field(
        default=16_384,
        gt=0,
        description="connections at once, as far as open files allow; one more ends the longest idle one, or is"
        " answered 503",
    )
    max_connections_per_address: int = Field(
        default=8192,
        ge=0,
        description="of one client's address, which is everybody's behind a proxy or on loopback; 0: no limit but all",
    )
    max_requests_per_key: int = Field(
        default=6000,
        ge=0,
        description="of one API key in progress at once, held polls among them; 0: no limit; more is answered 429",
    )
    max_url_bytes: int = Field(
        default=16 * 2**10, gt=0, description="path and query of a request; more is answered 414"
    )
    max_head_bytes: int = Field(default=64 * 2**10, gt=0, description="a request's headers; more is answered 431")
    head_timeout_s: float = Field(
        default=20.0, gt=0, description="how long a request's headers, or the first request, may take to come"
    )
    send_timeout_s: float = Field(
        default=120.0, gt=0, description="how long a client may read nothing of an answer; then its connection ends"
    )
    allowed_hosts: list[str] = Field(
        default=[],
        description="names under which clients reach the API beside its own address, for URLs in answers, like"
        ' ["twinkle.example", "twinkle.example:8443"]; better: public_url',
    )
