"""Where the workers of groups go on a cluster of several nodes, one of which has accelerators that are not NVIDIA's."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="the extra twinkle-queue[ray] is not installed")
# It starts a cluster of its own; how much of a CPU each takes is held in tests/unit/server/launch.
pytestmark = pytest.mark.soak

PLACES = """
import sys
import ray
from twinkle import DeviceGroup
from twinkle.infra.ray.placement import place_groups

ray.init(address=sys.argv[1], log_to_driver=False)
groups = [DeviceGroup("trained", 2, "npu"), DeviceGroup("sampled", 1, "GPU"), DeviceGroup("judged", 1, "cuda")]
placed = place_groups(groups)
hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
for group in groups:
    print(group.name, *(hosts[placed.nodes[placed.bundles[seat]]] for seat in placed.seats(group)))
print("on processors", sorted(placed.on_cpu))
free = ray.available_resources()
print("free NPUs", free.get("NPU", 0))
placed.remove()
"""


def test_workers_go_where_the_devices_of_their_kind_are_and_all_find_room() -> None:
    """Four workers on two nodes of one CPU each; of GPUs, which no node has, it is said once."""
    from harness.ray_cluster import RayCluster  # noqa: PLC0415 - it imports Ray, which may not be there

    with RayCluster(num_nodes=1, cpus_each=1) as cluster:
        host = cluster.add_node(NPU=2)
        told = subprocess.run(
            [sys.executable, "-c", PLACES, cluster.address], capture_output=True, text=True, timeout=200, check=False
        )

    assert told.returncode == 0, told.stderr
    trained, sampled, judged, on_cpu, free = told.stdout.splitlines()[-5:]
    assert trained == f"trained {host} {host}"
    assert sampled.startswith("sampled 127.0.0.") and judged.startswith("judged 127.0.0.")
    assert (on_cpu, free) == ("on processors ['judged', 'sampled']", "free NPUs 0")
    assert (told.stdout + told.stderr).count("ray.groups.on_cpu") == 1
