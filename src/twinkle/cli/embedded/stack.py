"""Which processes make up the embedded stack, and with which settings each one runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from twinkle.cli.embedded.broker import Broker
from twinkle.cli.embedded.child_secrets import API, BROKER, FLOWER, HOUSEKEEPING, JOBS, WORKER, Secret, only_its_own
from twinkle.cli.embedded.home import logs_of
from twinkle.cli.embedded.supervisor import ChildSpec
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings, environment_of

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,62})=(?P<device>[a-z]+(:\d+)?)")
_PARTS = {
    "ranks": re.compile(r"(ray:)?[1-9]\d{0,4}"),
    "engine": re.compile(r"transformers|megatron|null"),
    "tensor": re.compile(r"[1-9]\d{0,4}"),
    "pipeline": re.compile(r"[1-9]\d{0,4}"),
    "expert": re.compile(r"[1-9]\d{0,4}"),
    "serves": re.compile(r"everything|samples|training|whole-model"),
    "sampler": re.compile(r"torch|vllm"),
    "replicas": re.compile(r"[1-9]\d{0,2}-[1-9]\d{0,2}"),
    "model": re.compile(r".+"),
    "model-name": re.compile(r".+"),
}
"""What may follow a mesh and its device, and how."""
_VARIABLES = {
    "engine": "TWINKLE_ENGINE",
    "tensor": "TWINKLE_TENSOR_PARALLEL",
    "pipeline": "TWINKLE_PIPELINE_PARALLEL",
    "expert": "TWINKLE_EXPERT_PARALLEL",
    "serves": "TWINKLE_SERVES",
    "sampler": "TWINKLE_SAMPLER",
}
"""What is a setting of every mesh, unless one says otherwise of itself."""
_DEFAULT_MESH = "default=cpu"

WORKER_PREFIX = "worker-"
"""Of the names of the meshes' workers, before the mesh's own."""

_OF_GLIBC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "2097152"}
GIVES_MEMORY_BACK = {"PYTHONMALLOC": "malloc", **_OF_GLIBC} if sys.platform.startswith("linux") else {}
"""Of the API, unless the environment says otherwise: Python's own allocator keeps a megabyte for each object that lives
in it, and glibc an arena for each thread that ever asked. Once a large block was let go of, glibc also takes such ones
from its arenas, and keeps up to 64 MiB free at the end of each, which no call gives back: unless both are set.
The first two cost no time that could be measured."""

_API_STOP_S = 10.0
_DRAIN_S = 30.0
_BROKER_STOP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """A mesh, the device its worker runs on, and its base model: a path or an id, and what clients call it.

    ``ranks`` is how many devices, on this machine or (``ray:8``) on a Ray cluster; none: as the settings say.
    """

    name: str
    device: str
    model: str
    model_name: str
    ranks: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    """Parts of the flag that are a setting of the other meshes: an engine, its layout, what it serves."""
    replicas: tuple[int, int] | None = None
    """Between how many meshes like this one there are, this one among them, by how much waits; none: this one."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The processes in the order of their stopping: what takes requests, what does the work, what carries messages."""

    api: ChildSpec
    workers: tuple[ChildSpec, ...]
    broker: ChildSpec | None


def parse_meshes(texts: list[str], settings: Settings) -> list[MeshPlan]:
    """Read ``NAME=DEVICE[,PART=VALUE]...`` flags; without any, one mesh on the CPU.

    A mesh that names no model serves the one of the settings; what else it does not say is as they say too.

    One with replicas stands for the least number of them, ``NAME``, ``NAME-2``...

    Raises:
        ConfigError: A flag does not parse, or a name comes twice.
    """
    plans = [_mesh_plan(text, settings) for text in texts or [_DEFAULT_MESH]]
    names = [replica_name(plan.name, number) for plan in plans for number in range(1, (plan.replicas or (1, 1))[1] + 1)]
    if len(set(names)) < len(names):
        raise ConfigError(f"--mesh: a name may stand for one mesh only, got {', '.join(names)}")
    return [each for plan in plans for each in (plan, *_others_at_start(plan))]


def replica_name(name: str, number: int) -> str:
    """The name of one of several meshes that are alike, counted from 1."""
    return name if number == 1 else f"{name}-{number}"


def _others_at_start(plan: MeshPlan) -> list[MeshPlan]:
    least = 1 if plan.replicas is None else plan.replicas[0]
    return [replace(plan, name=replica_name(plan.name, number), replicas=None) for number in range(2, least + 1)]


def _mesh_plan(text: str, settings: Settings) -> MeshPlan:
    first, *rest = text.split(",")
    named = _NAME.fullmatch(first)
    pairs = [part.partition("=") for part in rest]
    parts = {key: value for key, _, value in pairs}
    is_wrong = any(key not in _PARTS or _PARTS[key].fullmatch(value) is None for key, value in parts.items())
    if named is None or is_wrong or len(parts) < len(pairs) or ("model-name" in parts and "model" not in parts):
        raise ConfigError(
            f"--mesh {text}: expected NAME=DEVICE, such as default=cpu or first=cuda:0; for more devices add"
            " ,ranks=4 or ,ranks=ray:8, for a model of its own ,model=MODEL and perhaps ,model-name=NAME, and for an"
            " engine or a purpose of its own ,engine=megatron,tensor=2,pipeline=2 or ,serves=samples; for one to four"
            " like it, as much as waits, ,replicas=1-4"
        )
    replicas: tuple[int, int] | None = None
    if "replicas" in parts:
        least, _, most = parts["replicas"].partition("-")
        replicas = int(least), int(most)
        if replicas[0] > replicas[1]:
            raise ConfigError(f"--mesh {text}: replicas={parts['replicas']} has its least above its most")
        on_ray = parts["ranks"].startswith("ray:") if "ranks" in parts else settings.ranks_on == "ray"
        if replicas[1] > 1 and named["device"] != "cpu" and not on_ray:
            raise ConfigError(
                f"--mesh {text}: on one machine all replicas would be on the same {named['device']}; name a mesh for"
                " each device (--mesh first=cuda:0 --mesh second=cuda:1), or let a Ray cluster give each its own"
                " (,ranks=ray:1)"
            )
    model, model_name = parts.get("model"), parts.get("model-name")
    if model is None:
        model, model_name = settings.model, settings.resolved_model_name
    return MeshPlan(
        name=named["name"],
        device=named["device"],
        model=model,
        model_name=model_name or model,
        ranks=parts.get("ranks"),
        own={key: value for key, value in parts.items() if key in _VARIABLES},
        replicas=replicas,
    )


def flag_of(mesh: MeshPlan) -> str:
    """The ``--mesh`` flag that says the same."""
    ranks = {} if mesh.ranks is None else {"ranks": mesh.ranks}
    replicas = {} if mesh.replicas is None else {"replicas": f"{mesh.replicas[0]}-{mesh.replicas[1]}"}
    model = {"model": mesh.model, "model-name": mesh.model_name} if mesh.model else {}
    parts = {mesh.name: mesh.device, **ranks, **mesh.own, **replicas, **model}
    return ",".join(f"{key}={value}" for key, value in parts.items())


def plan_stack(settings: Settings, meshes: list[MeshPlan], broker: Broker | None, *, with_flower: bool) -> Stack:
    """Lay out the processes. ``broker`` is ``None`` when the settings name one that is already there."""
    workers = [worker_spec(settings, mesh) for mesh in meshes]
    workers.append(_command(settings, "housekeeping", ("housekeeping",), _env(settings, HOUSEKEEPING), _DRAIN_S))
    workers.append(_command(settings, "jobs", ("jobs-worker",), _env(settings, JOBS), _DRAIN_S))
    if with_flower:
        workers.append(_command(settings, "flower", ("flower",), _env(settings, FLOWER), _API_STOP_S))
    return Stack(
        api=_command(settings, "api", ("server",), {**GIVES_MEMORY_BACK, **_env(settings, API)}, _API_STOP_S),
        workers=tuple(workers),
        broker=None if broker is None else broker_spec(settings, broker),
    )


def worker_spec(settings: Settings, mesh: MeshPlan) -> ChildSpec:
    """How the worker of a mesh runs."""
    env = _env(settings, WORKER) | {_VARIABLES[part]: value for part, value in mesh.own.items()}
    return _command(settings, f"{WORKER_PREFIX}{mesh.name}", _worker(mesh), env, _DRAIN_S)


def _worker(mesh: MeshPlan) -> tuple[str, ...]:
    place = ("--mesh", mesh.name, "--device", mesh.device)
    ranks = () if mesh.ranks is None else ("--ranks", mesh.ranks)
    return ("worker", *place, *ranks, "--model", mesh.model, "--model-name", mesh.model_name)


def broker_spec(settings: Settings, broker: Broker) -> ChildSpec:
    """How the broker runs. It needs none of our settings."""
    return ChildSpec(
        name="broker",
        argv=broker.argv,
        env=only_its_own(_inherited(), BROKER),
        log=logs_of(settings.home) / "broker.log",
        stop_timeout_s=_BROKER_STOP_S,
        longest_pause_s=settings.restart_pause_s,
    )


def _env(settings: Settings, needed: frozenset[Secret]) -> dict[str, str]:
    return only_its_own({**_inherited(), **environment_of(settings)}, needed)


def _inherited() -> dict[str, str]:
    """This process's environment without the settings, which every child gets explicitly."""
    env = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    return {**env, "PYTHONUNBUFFERED": "1"}


def _is_setting(name: str) -> bool:
    return name.startswith("TWINKLE_") and not name.startswith("TWINKLE_TEST_")


def _command(
    settings: Settings, name: str, command: tuple[str, ...], env: Mapping[str, str], stop_timeout_s: float
) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-m", "twinkle.cli", *command),
        env=env,
        log=logs_of(settings.home) / f"{name}.log",
        stop_timeout_s=stop_timeout_s,
        longest_pause_s=settings.restart_pause_s,
    )
