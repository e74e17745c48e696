"""All settings, read once at process entry from ``TWINKLE_*`` variables and passed down by group."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, PositiveFloat, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from twinkle.core.addresses import parse_networks
from twinkle.core.client_flags import ClientFlags
from twinkle.core.errors import ConfigError
from twinkle.core.foreign_settings import FOREIGN_SETTINGS
from twinkle.core.hub_settings import DEFAULT_HUBS, parse_hubs
from twinkle.core.limits import TenantLimits
from twinkle.core.loopback import is_loopback
from twinkle.core.operation import OperationKind
from twinkle.core.pictures import PictureLimits

_CLIENT_VARIABLES = {"TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN", "TWINKLE_MODEL_ID", "TWINKLE_JOB_ID"}

SAME_USER = "same"
"""In the place of a user's name: scripts run as the jobs worker itself."""


_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_SCHEMES: Mapping[str, tuple[str, ...]] = {
    "database_url": ("sqlite", "postgresql", "postgres"),
    "redis_url": ("redis", "rediss"),
    "object_store": ("file", "s3", "gs", "az", "abfs", "abfss"),
}
"""What the URLs of other services begin with."""
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", re.ASCII)
_OWN_PATHS = re.compile(r"/(api|v1)(/|$)")


class Settings(BaseSettings):
    """One tree for every process; each reads what it needs."""

    model_config = SettingsConfigDict(env_prefix="TWINKLE_", extra="forbid", frozen=True)

    # Where the truth, the broker and the blobs are.
    home: Path = Field(
        default=Path(".twinkle"), description="folder of the embedded stack: journal, objects, logs, keys"
    )
    database_url: str = Field(default="", description="sqlite:///path or postgresql://...; default in home")
    redis_url: SecretStr = Field(default=SecretStr(""), description="redis://... or rediss://...; broker and wake-ups")
    object_store: str = Field(default="", description="a folder or s3://, gs://, az:// URL; default in home")

    # The API.
    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    max_body_bytes: int = Field(default=64 * 2**20, gt=0, description="request body after decompression")
    inline_payload_bytes: int = Field(default=64 * 2**10, gt=0, description="larger payloads and results become blobs")
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
    max_outstanding_samples: int = Field(
        default=4000, gt=0, description="that wait or run, per tenant; more is answered 429"
    )
    max_body_bytes_in_flight: int = Field(
        default=2**30, gt=0, description="request bodies held at once, of everybody; more is answered 429"
    )
    max_picture_bytes: int = Field(default=8 * 2**20, gt=0, description="one picture's file; more is an error")
    max_picture_pixels: int = Field(
        default=2**24, gt=0, description="width times height of one picture, before it is decoded; more is an error"
    )
    max_pictures: int = Field(default=32, gt=0, description="pictures in one datum or prompt; more is an error")
    max_pending_submissions: int = Field(
        default=10_000, gt=0, description="operations waiting to be written to the journal; more is answered 429"
    )
    submit_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="how long a submission waits for the journal's database; then it is answered 503",
    )
    any_key: bool = Field(
        default=False,
        description="take any key, each for a tenant of its own; for one person, on loopback only",
    )
    public_url: str = Field(
        default="", description="the URL under which clients reach the API, in download URLs; default: as they ask"
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

    # What a tenant may use; `twinkle tenants set` gives one limits of its own.
    tenant_max_adapters: int = Field(
        default=1000, ge=0, description="adapters of live sessions, per tenant; 0: no limit; more is an error"
    )
    tenant_max_running: int = Field(
        default=0, ge=0, description="operations that run at once on one mesh, per tenant; 0: no limit; the rest waits"
    )
    tenant_max_body_bytes: int = Field(
        default=256 * 2**20,
        ge=0,
        description="request bodies held at once, per tenant; 0: no limit; more is answered 429",
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

    # Files.
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

    # Exports.
    export_targets: str = Field(
        default="hf://,ms://",
        description="where exports may be sent: the beginnings of addresses, in which {tenant} stands for whose it is,"
        " like hf://,s3://team/{tenant}/,file:///srv/exports/{tenant}; downloads always may",
    )
    export_memory_bytes: int = Field(
        default=16 * 2**30, gt=0, description="what comparing an export's logits may take; larger models are refused"
    )

    # The worker.
    mesh: str = Field(default="default", description="the mesh this worker serves")
    model: str = Field(default="", description="path or id of the frozen base model")
    model_name: str = Field(default="", description="the name clients use for it; default: as given in model")
    device: str = Field(default="cpu", description="cpu, cuda, cuda:0, npu")
    engine: str = Field(default="transformers", description="transformers, or null (computes nothing; for benchmarks)")
    sampler: Literal["torch", "vllm"] = Field(
        default="torch", description="torch: on the weights that train; vllm: a copy in vLLM, in the same process"
    )
    sampler_memory: float = Field(
        default=0.4, gt=0, lt=1, description="share of a GPU's memory for vLLM: its copy of the weights and its cache"
    )
    ranks: int = Field(default=1, ge=1, description="devices of the mesh, each with a process of its own")
    shard: Literal["replicate", "fsdp"] = Field(
        default="replicate",
        description="the base model on several ranks: whole on each (replicate), or its layers spread over them (fsdp)",
    )
    rank_timeout_s: float = Field(
        default=600.0, gt=0, description="how long ranks wait for each other before the worker gives up and starts anew"
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="intra-op threads of a rank; 0: the quickest number, measured at the first start of a mesh"
        " with its model on a kind of CPU, and kept",
    )
    measure_threads: bool = Field(default=False, description="measure that number anew at this start")
    tokens_per_pass: int = Field(default=0, ge=0, description="packed tokens per forward; 0: the engine's own choice")
    max_rank: int = Field(default=128, gt=0)
    max_adapters_per_step: int = Field(default=64, gt=0)
    min_tokens_per_step: int = Field(
        default=0,
        ge=0,
        description="fill a step up to here even with work of tenants that are ahead of their share",
    )
    transfer_threads: int = Field(default=8, gt=0)
    transfer_bytes: int = Field(default=1 << 30, gt=0)
    max_resident_adapters: int = Field(default=64, gt=0)
    parked_adapter_bytes: int = Field(
        default=4 << 30,
        ge=0,
        description="host memory for adapters that had to leave the device; beyond it they are evicted",
    )
    picture_cache_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="device memory for what the vision tower has made of pictures, kept for each tenant by itself",
    )
    sample_slots: int = Field(default=32, gt=0)
    sampler_state_bytes: int = Field(
        default=4 << 30,
        gt=0,
        description="device memory for what layers that carry a state (Qwen3.5, Nemotron-H) remember of the sequences"
        " sampled at once; fewer are, where it has no room for all",
    )
    prompt_cache_groups: dict[str, list[str]] = Field(
        default={},
        description="tenants that share computed prompts and can tell what the others sent, like"
        ' {"research": ["alice", "bob"]}; everybody else shares with nobody',
    )
    lease_s: float = Field(default=15.0, gt=0)
    sweep_s: float = Field(default=1.0, gt=0)
    max_attempts: int = Field(default=3, gt=0)
    snapshot_every_ops: int = Field(default=50, gt=0)
    snapshot_every_bytes: int = Field(
        default=64 << 20, gt=0, description="or after operations with so many bytes of payload"
    )
    snapshot_every_s: float = Field(default=60.0, gt=0)

    # Where models come from.
    hubs: str = Field(
        default=DEFAULT_HUBS, description="where an id without ms:// or hf:// is looked for, first to last"
    )
    offline: bool = Field(default=False, description="look at the hubs' caches alone")
    forbid_hf: bool = Field(default=False, description="leave Hugging Face out")
    model_id_aliases: dict[str, str] = Field(
        default={}, description='what stands for an id, for mirrors and tests, like {"org/name": "/a/folder"}'
    )
    trust_remote_code: str = Field(
        default="0",
        description="whose code may run: ids with a revision and folders, like ms://org/plugin@v1.2,/srv/plugin",
    )

    # What is kept of a run.
    retention_s: float = Field(
        default=7 * 24 * 3600.0,
        gt=0,
        description="how long a run can be forked from or rewound to what it was, and training payloads stay for it",
    )
    keep_snapshot_every_ops: int = Field(
        default=500, gt=0, description="within that time one snapshot in so many operations is kept"
    )
    max_snapshots: int = Field(default=16, ge=2, description="snapshots kept of one run at most")

    # Housekeeping.
    gap_timeout_s: float = Field(default=120.0, gt=0, description="how long operations wait for a missing number")
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
    result_ttl_s: float = Field(default=24 * 3600.0, gt=0)
    stall_s: float = Field(
        default=600.0, gt=0, description="how long nothing may move on a mesh that has work before livez answers 503"
    )
    operation_deadline_s: float = Field(
        default=24 * 3600.0, gt=0, description="an operation not finished by then fails"
    )
    operation_deadline_s_of: dict[OperationKind, PositiveFloat] = Field(
        default={}, description='kinds with a deadline of their own, like {"sample": 600}'
    )

    # Jobs.
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

    # Processors: data sets and loaders that clients of the Twinkle dialect have here.
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
    processor_process_idle_s: float = Field(
        default=300.0, gt=0, description="after so long without a call such a process is ended"
    )
    processor_idle_s: float = Field(
        default=6 * 3600.0, gt=0, description="how long a data set or loader stays that nothing is heard of"
    )
    processor_folders: list[str] = Field(
        default=[], description='folders of the server that clients may make data sets of, like ["/srv/data"]'
    )
    tenant_max_processors: int = Field(
        default=20,
        ge=0,
        description="data sets and loaders of live sessions, per tenant; 0: no limit; more is an error",
    )

    # Scripts of tenants, which are no sandbox.
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

    # Flower.
    flower_host: str = "127.0.0.1"
    flower_port: int = Field(default=5555, ge=0, le=65535)
    flower_user: str = "twinkle"
    flower_password: SecretStr = SecretStr("")

    log_level: str = "INFO"
    log_json: bool = False

    @field_validator("database_url", "redis_url", "object_store")
    @classmethod
    def _know_scheme(cls, value: str | SecretStr, info: ValidationInfo) -> str | SecretStr:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        scheme, separator, _ = text.partition("://")
        known = _SCHEMES[info.field_name or ""]
        if not text or (not separator and info.field_name == "object_store"):
            return value
        if not separator or scheme not in known:
            raise ValueError(f"must begin with one of {', '.join(f'{name}://' for name in known)}")
        return value

    @field_validator("log_level")
    @classmethod
    def _know_level(cls, level: str) -> str:
        if level.upper() not in _LOG_LEVELS:
            raise ValueError(f"must be one of {', '.join(_LOG_LEVELS)}")
        return level.upper()

    @field_validator("hubs")
    @classmethod
    def _know_hubs(cls, hubs: str) -> str:
        try:
            parse_hubs(hubs)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return hubs

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

    @field_validator("webhook_networks")
    @classmethod
    def _know_networks(cls, networks: list[str]) -> list[str]:
        parse_networks(networks)
        return networks

    @field_validator("prompt_cache_groups")
    @classmethod
    def _name_each_tenant_once(cls, groups: dict[str, list[str]]) -> dict[str, list[str]]:
        names = sorted(name for members in groups.values() for name in members)
        twice = [name for name, following in pairwise(names) if name == following]
        if twice:
            raise ValueError(f"{twice[0]} is named twice; a tenant shares with one group")
        return groups

    @property
    def resolved_database_url(self) -> str:
        """The journal's URL, embedded default included."""
        return self.database_url or f"sqlite:///{self.journal_file}"

    @property
    def journal_file(self) -> Path:
        """Where the embedded journal is, if no other database is named."""
        return self.home.absolute() / "journal.db"

    @property
    def resolved_object_store(self) -> str:
        """The object store's URL or folder, embedded default included."""
        return self.object_store or str(self.home.absolute() / "objects")

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
        )

    @property
    def picture_limits(self) -> PictureLimits:
        """What pictures a client may send."""
        return PictureLimits(
            max_bytes=self.max_picture_bytes, max_pixels=self.max_picture_pixels, max_pictures=self.max_pictures
        )

    @property
    def mounted_at(self) -> str:
        """The path under which clients reach the API; empty at the root of its host."""
        path = self.root_path or urlsplit(self.public_url).path.rstrip("/")
        return "" if _OWN_PATHS.match(path) else path

    @property
    def resolved_model_name(self) -> str:
        """The name under which clients ask for the base model."""
        return self.model_name or self.model


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
