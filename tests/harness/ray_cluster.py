"""A Ray cluster of several nodes on this machine, each under an address of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from ray.cluster_utils import Cluster

_STORE_BYTES = 100 * 2**20


class RayCluster:
    """A head without CPUs, which only keeps the books, and nodes ``127.0.0.3``, ``127.0.0.4``, ..."""

    def __init__(self, *, num_nodes: int, cpus_each: float = 4) -> None:
        self._cpus_each = cpus_each
        self._cluster = Cluster(
            initialize_head=True, head_node_args=self._arguments(num_cpus=0, node_ip_address="127.0.0.2")
        )
        self._nodes: list[Any] = []
        for _ in range(num_nodes):
            self.add_node()

    @property
    def address(self) -> str:
        """Where drivers find it."""
        return str(self._cluster.address)

    def add_node(self, **devices: int) -> str:
        """Start one more machine, with devices by the names that Ray has for them; its address."""
        host = f"127.0.0.{len(self._nodes) + 3}"
        arguments = self._arguments(num_cpus=self._cpus_each, node_ip_address=host, resources=devices)
        self._nodes.append(self._cluster.add_node(**arguments))
        return host

    def kill_node(self, host: str) -> None:
        """Take a machine away, with all that runs on it."""
        for node in self._nodes:
            if node.node_ip_address == host:
                self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        """End every process."""
        self._cluster.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @staticmethod
    def _arguments(**more: object) -> dict[str, Any]:
        return {"object_store_memory": _STORE_BYTES, "include_dashboard": False, **more}
