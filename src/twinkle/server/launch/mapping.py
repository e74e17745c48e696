"""From a ``server_config.yaml`` to what ``twinkle serve`` is told, key by key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from pydantic import BaseModel

from twinkle.core.errors import ConfigError
from twinkle.core.model_names import plain_model_name
from twinkle.server.launch.cluster import Cluster
from twinkle.server.launch.layout import Layout, layout_of, layout_to_sample
from twinkle.server.launch.plan import Fate, Plan
from twinkle.server.launch.schema import (
    FreeSection,
    GatewayApplication,
    ModelApplication,
    ProcessorApplication,
    QueueConfig,
    SamplerApplication,
    ServerConfig,
)

LOOPBACK = {"localhost": "127.0.0.1"}
_SECONDS_A_MINUTE = 60
_BAD_NAME = re.compile(r"[^A-Za-z0-9_-]+")

_MEANINGLESS: Mapping[str, str] = {
    "ray_namespace": "no Ray is needed to serve",
    "proxy_location": "one process listens, and no Ray proxy stands before it",
    "task_queue": "the queue is the journal's, and has nothing to set here",
    "telemetry": "nothing is exported by OpenTelemetry yet",
    "route_prefix": "routes are where the protocol has them",
    "actor_name": "there is no actor",
    "cleanup_interval": "housekeeping sweeps once a minute",
    "metrics_update_interval": "nothing is sampled at intervals",
    "adapter_max_lifetime": "no adapter ends by its age",
    "rps_limit": "requests are not counted; operations wait in their tenant's turn",
    "window_seconds": "a rate is kept by the minute",
    "queue_timeout": "what was accepted is never dropped for waiting",
    "execution_timeout": "an operation ends by its own deadline (TWINKLE_OPERATION_DEADLINE_S)",
    "token_cleanup_multiplier": "rates take no memory that had to be swept",
    "token_cleanup_interval": "rates take no memory that had to be swept",
    "max_input_tokens": "large requests are cut into passes",
    "max_length": "a sequence may be as long as the model's context",
    "max_ongoing_requests": "requests wait for nothing in the API",
    "target_ongoing_requests": "only the meshes of models follow load",
    "upscale_delay_s": "only the meshes of models follow load",
    "downscale_delay_s": "only the meshes of models follow load",
    "min_replicas": "only the meshes of models follow load",
    "max_replicas": "only the meshes of models follow load",
    "ray_actor_options": "a rank is an actor of its own, with one device",
    "num_cpus": "no Ray is needed to serve",
    "name": "it is the name of a part that is none here",
}


_SCALING: Mapping[str, str] = {
    "target_ongoing_requests": "TWINKLE_REPLICA_OPERATIONS",
    "upscale_delay_s": "TWINKLE_REPLICA_GROW_S",
    "downscale_delay_s": "TWINKLE_REPLICA_SHRINK_S",
}
_NO_DEVICE = "data sets and loaders are served by the jobs worker, without a device"


def has_cuda() -> bool:
    """Whether the driver shows an NVIDIA GPU; nothing heavy is loaded to find out."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def plan_of(config: ServerConfig, *, cuda: bool | None = None, cluster: Cluster | None = None) -> Plan:
    """Map a file.

    Args:
        config: What it holds.
        cuda: Whether there is a GPU; looked for by default.
        cluster: The Ray cluster on whose nodes the ranks of all meshes are to be.

    Raises:
        ConfigError: It serves no model, or two of one name.
    """
    plan = Plan(on_cluster=cluster is not None)
    cuda = _has_gpus(cluster) if cuda is None else cuda
    _listen(plan, config)
    _keep(plan, config)
    for key in ("ray_namespace", "proxy_location", "task_queue"):
        _without_meaning(plan, key, getattr(config, key))
    if config.telemetry is not None:
        _without_meaning(plan, "telemetry", config.telemetry)
    models = [
        (f"applications.{index}", application)
        for index, application in enumerate(config.applications)
        if isinstance(application, ModelApplication | SamplerApplication)
    ]
    if not models:
        raise ConfigError("applications: none has import_path `model` or `sampler`, so there is no model to serve")
    served = {plain_model_name(one.args.model_id) for _, one in models}
    alone = _serve(plan, models, cuda=cuda)
    _join(plan, cluster)
    for index, application in enumerate(config.applications):
        place = f"applications.{index}"
        if isinstance(application, GatewayApplication):
            _gateway(plan, place, application, served)
        elif isinstance(application, ProcessorApplication):
            _processor(plan, place, application)
        for key in ("name", "route_prefix"):
            _without_meaning(plan, f"{place}.{key}", getattr(application, key))
        for number, deployment in enumerate(application.deployments):
            of_model = isinstance(application, ModelApplication | SamplerApplication)
            key = f"{place}.deployments.{number}"
            _deployment(plan, key, deployment, of_model=of_model, why_alone=alone.get(place))
    return plan


def _serve(
    plan: Plan, models: Sequence[tuple[str, ModelApplication | SamplerApplication]], *, cuda: bool
) -> dict[str, str | None]:
    """Give each model its meshes: first those that train, since a sampler may find its model on one of them.

    Returns:
        By its place, why a model has one mesh however many its deployments want; none: it has as many.
    """
    trained: dict[str, Layout] = {}
    alone: dict[str, str | None] = {}
    for place, model in models:
        if isinstance(model, ModelApplication):
            layout = trained[plain_model_name(model.args.model_id)] = _train(plan, place, model, cuda=cuda)
            alone[place] = _why_alone(plan, layout)
    for place, model in models:
        if isinstance(model, SamplerApplication):
            sampled = _sample(plan, place, model, cuda=cuda, trained=trained.get(plain_model_name(model.args.model_id)))
            alone[place] = "no mesh: that of its model samples" if sampled is None else _why_alone(plan, sampled)
    return alone


def _has_gpus(cluster: Cluster | None) -> bool:
    return has_cuda() if cluster is None else cluster.num_gpus > 0


def _join(plan: Plan, cluster: Cluster | None) -> None:
    """Let the ranks of every mesh be actors of the cluster, as many as are planned; one where none are."""
    if cluster is None:
        return
    common = int(plan.settings.pop("TWINKLE_RANKS", "1"))
    own = {flag: re.search(r",ranks=(\d+)", flag) for flag in plan.meshes}
    numbers = {flag: common if found is None else int(found[1]) for flag, found in own.items()}
    plain = {flag: re.sub(r",ranks=\d+", "", flag) for flag in plan.meshes}
    plan.meshes = [plain[flag].replace(",", f",ranks=ray:{number},", 1) for flag, number in numbers.items()]
    plan.settings["TWINKLE_RAY_ADDRESS"] = cluster.address
    most = [re.search(r",replicas=\d+-(\d+)", flag) for flag in plan.meshes]
    num_ranks = [
        number * (1 if found is None else int(found[1])) for number, found in zip(numbers.values(), most, strict=True)
    ]
    on_gpus = [number for number, flag in zip(num_ranks, plan.meshes, strict=True) if "=cuda," in flag]
    plan.settings["TWINKLE_RANK_CPUS"] = f"{cluster.cpus_of_a_rank(sum(num_ranks), num_on_gpus=sum(on_gpus)):g}"
    has = f"{cluster.num_gpus} GPUs and {cluster.num_cpus:g} CPUs"
    note = f"TWINKLE_RAY_ADDRESS={cluster.address}; its nodes have {has}; --mesh {' and --mesh '.join(plan.meshes)}"
    plan.note("(the Ray cluster that runs)", cluster.address, "mapped", note)


def _listen(plan: Plan, config: ServerConfig) -> None:
    options = config.http_options
    plan.map("http_options.host", options.host, "TWINKLE_HOST", LOOPBACK.get(options.host, options.host), fate="used")
    plan.map("http_options.port", options.port, "TWINKLE_PORT", str(options.port), fate="used")
    for key, value in options.keys.items():
        plan.note(f"http_options.{key}", value, "meaningless", "it is an option of Ray Serve's proxy")


def _keep(plan: Plan, config: ServerConfig) -> None:
    kept = config.persistence
    if kept is None:
        return
    if kept.mode is not None:
        plan.note("persistence.mode", kept.mode, "meaningless", "records are always kept, in the journal's database")
    if kept.file_path is not None:
        home = str(Path(kept.file_path).expanduser().parent / "twinkle")
        plan.map("persistence.file_path", kept.file_path, "TWINKLE_HOME", home, note="a folder, beside that file")
    if kept.redis_url is not None:
        plan.map(
            "persistence.redis_url", kept.redis_url, "TWINKLE_REDIS_URL", kept.redis_url, note="as the broker only"
        )
    if kept.key_prefix:
        plan.note("persistence.key_prefix", kept.key_prefix, "meaningless", "a broker is one service's")


def _train(plan: Plan, place: str, application: ModelApplication, *, cuda: bool) -> Layout:
    args = application.args
    where = f"{place}.args"
    layout = layout_of(plan, where, args, cuda=cuda)
    _mesh(plan, where, args.model_id, layout, copies=_copies(plan, application, layout))
    if args.backend == "mock":
        plan.map(f"{where}.backend", "mock", "TWINKLE_ENGINE", "null", note="it computes nothing")
    elif args.backend == "transformers":
        plan.note(f"{where}.backend", args.backend, "used", "the transformers engine serves it")
    elif args.backend is not None and args.use_megatron:
        plan.note(f"{where}.backend", args.backend, "used", "use_megatron says the same")
    if args.use_megatron is False:
        plan.note(f"{where}.use_megatron", False, "used", "the transformers engine serves it")
    if args.max_loras is not None:
        note = "so many on the device; the others wait beside it and are not refused"
        plan.map(f"{where}.max_loras", args.max_loras, "TWINKLE_MAX_RESIDENT_ADAPTERS", str(args.max_loras), note=note)
    if args.max_r is not None:
        plan.map(f"{where}.max_r", args.max_r, "TWINKLE_MAX_RANK", str(args.max_r))
    adapters = args.adapter_config
    if adapters is not None:
        if adapters.adapter_timeout is not None:
            plan.map(
                f"{where}.adapter_config.adapter_timeout",
                adapters.adapter_timeout,
                "TWINKLE_SESSION_TIMEOUT_S",
                _text(adapters.adapter_timeout),
                note="then adapters are parked, never dropped",
            )
        if adapters.per_token_adapter_limit is not None:
            _limit_adapters(plan, f"{where}.adapter_config.per_token_adapter_limit", adapters.per_token_adapter_limit)
        _without_meaning(plan, f"{where}.adapter_config.adapter_max_lifetime", adapters.adapter_max_lifetime)
    _queue(plan, where, args.queue_config)
    _without_meaning(plan, f"{where}.max_length", args.max_length)
    return layout


def _sample(
    plan: Plan, place: str, application: SamplerApplication, *, cuda: bool, trained: Layout | None
) -> Layout | None:
    """The layout of the mesh that it has; none where it has none of its own."""
    args = application.args
    where = f"{place}.args"
    if trained is not None and trained.trains_only:
        layout = layout_to_sample(plan, where, args, cuda=cuda)
    else:
        layout = layout_of(plan, where, args, cuda=cuda)
    has_mesh = trained is None or trained.trains_only
    if not has_mesh:
        note = "its mesh samples as well; no second copy of the weights is loaded"
        plan.note(f"{where}.model_id", args.model_id, "changed", note)
    else:
        _mesh(plan, where, args.model_id, layout, copies=_copies(plan, application, layout))
    device = layout.device
    if args.sampler_type is not None:
        on_gpu = device.startswith("cuda") and not plan.on_cluster
        chosen = "vllm" if args.sampler_type == "vllm" and on_gpu else "torch"
        fate: Fate = "used" if chosen == args.sampler_type else "changed"
        note = "" if fate == "used" else "our own sampler serves it here"
        plan.map(f"{where}.sampler_type", args.sampler_type, "TWINKLE_SAMPLER", chosen, note=note, fate=fate)
    engine = args.engine_args.keys if args.engine_args is not None else {}
    for key, value in engine.items():
        if key == "gpu_memory_utilization":
            plan.map(f"{where}.engine_args.{key}", value, "TWINKLE_SAMPLER_MEMORY", str(value))
        else:
            plan.note(f"{where}.engine_args.{key}", value, "meaningless", "the sampler follows the mesh")
    _queue(plan, where, args.queue_config)
    return layout if has_mesh else None


def _gateway(plan: Plan, place: str, application: GatewayApplication, served: set[str]) -> None:
    args = application.args
    where = f"{place}.args"
    for name in args.supported_models or ():
        if plain_model_name(name) not in served:
            known = ", ".join(sorted(served))
            raise ConfigError(f"{where}.supported_models: no application serves {name}; the file's models are {known}")
    if args.supported_models is not None:
        plan.note(f"{where}.supported_models", args.supported_models, "used", "all of them are served")
    settings = args.server_config
    if settings is not None:
        if settings.expiration_timeout is not None:
            seconds = settings.expiration_timeout
            key = f"{where}.server_config.expiration_timeout"
            plan.map(key, seconds, "TWINKLE_RESULT_TTL_S", _text(seconds), note="results; runs and checkpoints stay")
        if settings.per_token_model_limit is not None:
            _limit_adapters(plan, f"{where}.server_config.per_token_model_limit", settings.per_token_model_limit)
        for key in ("cleanup_interval", "metrics_update_interval", "actor_name"):
            _without_meaning(plan, f"{where}.server_config.{key}", getattr(settings, key))
    if args.http_options is not None:
        plan.note(
            f"{where}.http_options", args.http_options, "meaningless", "http_options at the top say where to listen"
        )
    _without_meaning(plan, f"{where}.route_prefix", args.route_prefix)


def _processor(plan: Plan, place: str, application: ProcessorApplication) -> None:
    """The jobs worker serves data sets and loaders; its processes start with the first of them."""
    num_processes = application.args.ncpu_proc_per_node
    if num_processes is not None:
        most = os.cpu_count() or 1
        text = str(max(1, min(num_processes, most)))
        note = f"this machine has {most} processors" if num_processes > most else ""
        plan.map(f"{place}.args.ncpu_proc_per_node", num_processes, "TWINKLE_PROCESSOR_PROCESSES", text, note=note)
    for key in type(application.args).model_fields:
        value = getattr(application.args, key)
        if value is not None and key != "ncpu_proc_per_node":
            plan.note(f"{place}.args.{key}", _shown(value), "meaningless", _NO_DEVICE)


def _mesh(plan: Plan, where: str, model_id: str, layout: Layout, *, copies: tuple[int, int]) -> None:
    stem = _BAD_NAME.sub("-", plain_model_name(model_id)).strip("-")[:50] or "model"
    taken = {flag.partition("=")[0] for flag in plan.meshes}
    name = plain_model_name(model_id)
    mesh = next(one for one in _names(stem) if one not in taken)
    least, most = copies
    replicas = "" if most == 1 else f",replicas={least}-{most}"
    plan.meshes.append(f"{mesh}={layout.flag}{replicas},model={model_id},model-name={name}")
    note = f"--mesh {plan.meshes[-1]}; clients call it {name}, with or without ms:// or hf://"
    plan.note(f"{where}.model_id", model_id, "mapped", note)


def _names(stem: str) -> Iterator[str]:
    yield stem
    # Not what the replicas of the first are called.
    yield from (f"{stem}-{letter}" for letter in ascii_lowercase)


def _queue(plan: Plan, where: str, limits: QueueConfig | None) -> None:
    if limits is None:
        return
    for key in type(limits).model_fields:
        value = getattr(limits, key)
        if key == "tps_limit" and value is not None and limits.enabled is not False:
            minute = str(int(value * _SECONDS_A_MINUTE))
            note = "beyond it training waits, samples are answered 429"
            plan.map(f"{where}.queue_config.{key}", value, "TWINKLE_TENANT_TOKENS_PER_MINUTE", minute, note=note)
        elif key == "enabled" and value is not None:
            plan.note(f"{where}.queue_config.{key}", value, "used", "of the limits that have a meaning here")
        else:
            _without_meaning(plan, f"{where}.queue_config.{key}", value)


def _copies(plan: Plan, application: ModelApplication | SamplerApplication, layout: Layout) -> tuple[int, int]:
    """Between how many meshes: what its deployments want at least and at most; one at least."""
    if _why_alone(plan, layout) is not None:
        return 1, 1
    scaled = [each.autoscaling_config.keys for each in application.deployments if each.autoscaling_config is not None]
    least = max([1, *(int(keys.get("min_replicas", 1)) for keys in scaled)])
    return least, max([least, *(int(keys.get("max_replicas", 1)) for keys in scaled)])


def _why_alone(plan: Plan, layout: Layout) -> str | None:
    """Why there is one mesh of this layout, however many are wanted; none: there may be more."""
    if layout.trains_whole_model:
        return "one mesh: runs of whole models share none, so none follows load"
    if layout.device != "cpu" and not plan.on_cluster:
        return "one mesh: on this machine's GPUs all would be on the same ones; a Ray cluster gives each its own"
    return None


def _deployment(plan: Plan, where: str, deployment: FreeSection, *, of_model: bool, why_alone: str | None) -> None:
    held = {name: getattr(deployment, name) for name in type(deployment).model_fields} | deployment.keys
    for key, value in _flat(where, held):
        name = key.rpartition(".")[2]
        if ".env_vars." in key:
            plan.note(key, value, "meaningless", "set variables where `twinkle-server` is started")
        elif value is not None and of_model and name in _SCALING:
            plan.map(key, value, _SCALING[name], f"{float(str(value)):g}", note="of meshes that follow load")
        elif value is not None and of_model and name in ("min_replicas", "max_replicas"):
            if why_alone is not None and _is_many(value):
                plan.note(key, value, "changed", why_alone)
                continue
            plan.note(key, value, "used", "so many meshes at least, one if 0" if name[1] == "i" else "so many at most")
        else:
            _without_meaning(plan, key, value)


def _is_many(number: object) -> bool:
    return isinstance(number, int) and number > 1


def _flat(where: str, held: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in held.items():
        inner = value.keys if isinstance(value, FreeSection) else value
        if isinstance(inner, dict) and inner:
            yield from _flat(f"{where}.{name}", inner)
        else:
            yield f"{where}.{name}", inner


def _limit_adapters(plan: Plan, key: str, number: int) -> None:
    plan.map(key, number, "TWINKLE_TENANT_MAX_ADAPTERS", str(number), note="of live sessions, per tenant")


def _without_meaning(plan: Plan, key: str, value: object) -> None:
    if value is None:
        return
    why = _MEANINGLESS.get(key.rpartition(".")[2], "it is an option of Ray Serve")
    plan.note(key, _shown(value), "meaningless", why)


def _shown(value: object) -> object:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value


def _text(seconds: float) -> str:
    return f"{seconds:g}"
