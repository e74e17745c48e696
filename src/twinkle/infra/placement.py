"""A drawing of who runs where, for a script's log."""

from __future__ import annotations

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.platform import Platform
from twinkle.infra.runtime import runtime


def get_device_placement() -> str:
    """The device groups and the global mesh of ``initialize``, in a box; with Ray each worker, and who is there."""
    current = runtime()
    lines = [f"mode {current.mode}, seed {current.seed}"]
    if current.cluster is None:
        lines += [_group_line(group) for group in current.groups]
    else:
        lines += current.cluster.describe()
    if current.device_mesh is None and current.cluster is not None:
        lines.append("no global mesh: the ranks of a group are all on dp, unless components bring a mesh")
    elif current.device_mesh is None:
        platform = Platform.current()
        lines.append(f"no global mesh: components run on one {platform.device_type} device unless they bring a mesh")
    else:
        lines += _mesh_lines(current.device_mesh)
    width = max(len(line) for line in lines)
    title = " device placement "
    top = f"┌{title.center(width + 2, '─')}┐"
    return "\n".join([top, *(f"│ {line:<{width}} │" for line in lines), f"└{'─' * (width + 2)}┘"])


def _group_line(group: DeviceGroup) -> str:
    ranks = ", ".join(map(str, group.rank_numbers))
    return f"group {group.name}: {group.device_type} {ranks} ({group.num_workers} workers)"


def _mesh_lines(mesh: DeviceMesh) -> list[str]:
    lines = [f"mesh: {mesh} = {mesh.world_size} ranks"]
    for rank in range(mesh.world_size):
        place = ", ".join(f"{axis} {at}" for axis, at in mesh.coordinates(rank).items())
        lines.append(f"  rank {rank}: {place}; data part {mesh.data_part(rank)} of {mesh.data_world_size}")
    return lines
