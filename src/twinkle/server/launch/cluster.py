"""The Ray cluster that is there when a ``server_config.yaml`` is launched, as the documents start one before it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from twinkle.core.errors import ConfigError
from twinkle.core.process.answering import is_answered
from twinkle.core.process.cluster_room import Node, OnDevices, cpus_of_a_worker
from twinkle.core.process.ray_token import TOKEN_HINT, take_token

_ANSWERS_S = 2.0
_GPU = "GPU"
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster, and what its nodes have."""

    address: str
    nodes: tuple[Node, ...]

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return int(sum(node.devices.get(_GPU, 0) for node in self.nodes))

    @property
    def num_cpus(self) -> float:
        """Of all nodes."""
        return sum(node.num_cpus for node in self.nodes)

    def cpus_of_a_rank(self, num_ranks: int, *, num_on_gpus: int = 0) -> float:
        """The CPUs that each of so many ranks takes, so that all find room for which there are devices."""
        on_gpus = [OnDevices(device=_GPU, num_workers=num_on_gpus)]
        return cpus_of_a_worker(self.nodes, num_ranks, on_gpus) or _SMALLEST_SHARE


def running_cluster(environment: MutableMapping[str, str] = os.environ, *, note: Path | None = None) -> Cluster | None:
    """The cluster that the environment names, else the one that this machine is a node of, if it answers.

    Where the cluster asks for the token that lies here, the environment says afterwards that it is to be shown.

    Args:
        environment: Of this process.
        note: Where `ray start` notes the cluster that it has started or joined; found by default.

    Raises:
        ConfigError: One is named, and Ray is not installed, or there is none at that address.
    """
    named = environment.get("TWINKLE_RAY_ADDRESS") or environment.get("RAY_ADDRESS")
    note = _note_of_ray(environment) if note is None else note
    address = named or (note.read_text().strip() if note.is_file() else "")
    if not address or (address != "auto" and not is_answered(address, timeout_s=_ANSWERS_S)):
        if named:
            # Ray itself would try for minutes.
            raise ConfigError(f"RAY_ADDRESS: nobody answers at {named!r}; start a cluster with `ray start --head`")
        return None
    if find_spec("ray") is None:
        if named:
            raise ConfigError("RAY_ADDRESS: joining a Ray cluster needs Ray; install twinkle-queue[ray]")
        return None
    take_token(address, environment)
    import ray  # noqa: PLC0415 - an extra, and slow to import
    from ray.exceptions import RayError  # noqa: PLC0415 - the same

    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"RAY_ADDRESS: no Ray cluster at {address!r} ({reason}); {TOKEN_HINT}") from error
    try:
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        found = str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()
    nodes = tuple(Node(num_cpus=has.get("CPU", 0.0), devices=has) for has in alive)
    return Cluster(address=found, nodes=nodes)


def _note_of_ray(environment: Mapping[str, str]) -> Path:
    """Ray's folder of temporary files is where these two variables say."""
    folder = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"
    return Path(folder, "ray", "ray_current_cluster")
