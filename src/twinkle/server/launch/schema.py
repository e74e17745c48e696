"""What a ``server_config.yaml`` may hold: a key that is none is refused with the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from twinkle.core.errors import ConfigError


class Section(BaseModel):
    """A mapping whose keys are known."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class FreeSection(BaseModel):
    """A mapping that is passed on to another program, whatever its keys."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def keys(self) -> dict[str, Any]:
        """What is in it."""
        return dict(self.model_extra or {})


class HttpOptions(FreeSection):
    """Where the API listens."""

    host: str = "localhost"
    port: int = Field(default=8000, ge=0, le=65535)


class Telemetry(Section):
    """OpenTelemetry."""

    enabled: bool = False
    service_name: str | None = None
    otlp_endpoint: str | None = None
    debug: bool | None = None
    export_interval_ms: int | None = None
    resource_attributes: dict[str, str] | None = None


class Persistence(Section):
    """Where the records are."""

    mode: Literal["memory", "file", "redis"] | None = None
    file_path: str | None = None
    redis_url: str | None = None
    key_prefix: str | None = None


class QueueConfig(Section):
    """Limits of a replica's queue."""

    enabled: bool | None = None
    rps_limit: float | None = None
    tps_limit: float | None = Field(default=None, gt=0)
    window_seconds: float | None = None
    queue_timeout: float | None = None
    execution_timeout: float | None = None
    token_cleanup_multiplier: float | None = None
    token_cleanup_interval: float | None = None
    max_input_tokens: int | None = None


class AdapterConfig(Section):
    """How long adapters live."""

    adapter_timeout: float | None = Field(default=None, gt=0)
    adapter_max_lifetime: float | None = None
    per_token_adapter_limit: int | None = Field(default=None, ge=0)


class DeviceGroup(Section):
    """Devices by name."""

    name: str | None = None
    ranks: int | list[int] | None = None
    device_type: str | None = None
    gpus_per_worker: int | None = None
    visible_devices: str | None = None


class DeviceMesh(FreeSection):
    """How the ranks of a model are laid out; sizes by name, like ``dp_size``."""

    device_type: str | None = None


class _OnDevices(Section):
    nproc_per_node: int | None = Field(default=None, ge=1)
    device_group: DeviceGroup | None = None
    device_mesh: DeviceMesh | None = None
    queue_config: QueueConfig | None = None


class ModelArgs(_OnDevices):
    """A base model that is trained on."""

    model_id: str
    backend: Literal["mock", "transformers", "megatron"] | None = None
    use_megatron: bool | None = None
    train_mode: Literal["lora", "full"] | None = None
    adapter_config: AdapterConfig | None = None
    max_loras: int | None = Field(default=None, ge=1)
    max_length: int | None = None
    max_r: int | None = Field(default=None, ge=1)


class SamplerArgs(_OnDevices):
    """A base model that is sampled from."""

    model_id: str
    sampler_type: Literal["mock", "vllm", "torch"] | None = None
    engine_args: FreeSection | None = None


class ProcessorArgs(_OnDevices):
    """Data sets on the server."""

    ncpu_proc_per_node: int | None = None


class GatewaySettings(Section):
    """The gateway's own settings."""

    expiration_timeout: float | None = Field(default=None, gt=0)
    cleanup_interval: float | None = None
    per_token_model_limit: int | None = Field(default=None, ge=0)
    metrics_update_interval: float | None = None
    actor_name: str | None = None


class GatewayArgs(Section):
    """The gateway."""

    server_config: GatewaySettings | None = None
    supported_models: list[str] | None = None
    http_options: HttpOptions | None = None
    route_prefix: str | None = None


class Deployment(FreeSection):
    """Options of a Ray Serve deployment."""

    autoscaling_config: FreeSection | None = None
    ray_actor_options: FreeSection | None = None


class _Application(Section):
    name: str | None = None
    route_prefix: str | None = None
    deployments: list[Deployment] = Field(default=[])


class GatewayApplication(_Application):
    """The one that clients meet first."""

    import_path: Literal["server"]
    args: GatewayArgs = GatewayArgs()


class ModelApplication(_Application):
    """One base model's."""

    import_path: Literal["model"]
    args: ModelArgs


class SamplerApplication(_Application):
    """One base model's."""

    import_path: Literal["sampler"]
    args: SamplerArgs


class ProcessorApplication(_Application):
    """The processors'."""

    import_path: Literal["processor"]
    args: ProcessorArgs = ProcessorArgs()


Application: TypeAlias = Annotated[
    GatewayApplication | ModelApplication | SamplerApplication | ProcessorApplication,
    Field(discriminator="import_path"),
]


class ServerConfig(Section):
    """A whole file."""

    ray_namespace: str | None = None
    proxy_location: str | None = None
    http_options: HttpOptions = HttpOptions()
    telemetry: Telemetry | None = None
    persistence: Persistence | None = None
    task_queue: FreeSection | None = None
    applications: list[Application] = Field(min_length=1)


def read_config(path: Path) -> ServerConfig:
    """Read a file.

    Raises:
        ConfigError: It is not there, is no YAML, or holds what it may not.
    """
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name it with -c") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is no YAML: {error}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"{path}: must hold a mapping with `applications`")
    return parse_config(held, source=str(path))


def parse_config(held: Mapping[str, Any], *, source: str = "config") -> ServerConfig:
    """Check what a file holds.

    Raises:
        ConfigError: The first thing that is wrong, by its place.
    """
    try:
        return ServerConfig.model_validate(held)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_told(error.errors(include_url=False)[0])}") from error


def _told(error: ErrorDetails) -> str:
    # The union's tag stands in the place as if it were a key.
    place = [part for index, part in enumerate(error["loc"]) if not (index == 2 and error["loc"][0] == "applications")]
    name = ".".join(str(part) for part in place)
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg']}"
    near = difflib.get_close_matches(str(place[-1]), sorted(_ALL_KEYS), n=1)
    return f"{name}: is no key of this place" + (f"; did you mean {near[0]}?" if near else "")


def _keys_of(section: type[BaseModel]) -> set[str]:
    return set(section.model_fields)


_ALL_KEYS = set[str]().union(
    *(
        _keys_of(section)
        for section in (
            ServerConfig,
            HttpOptions,
            Telemetry,
            Persistence,
            QueueConfig,
            AdapterConfig,
            DeviceGroup,
            ModelArgs,
            SamplerArgs,
            ProcessorArgs,
            GatewaySettings,
            GatewayArgs,
            Deployment,
            GatewayApplication,
        )
    )
)
