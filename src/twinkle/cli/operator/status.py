"""``twinkle status``: the meshes, their adapters and what waits for them, straight from the journal."""

from __future__ import annotations

import json
from dataclasses import asdict

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import print_table
from twinkle.core.settings import Settings
from twinkle.storage.journal.meshes import MeshCensus

_GB = 1e9


def show_status(settings: Settings, *, as_json: bool) -> None:
    """Print one row a mesh."""
    meshes = _census(settings)
    if as_json:
        say(json.dumps([asdict(mesh) for mesh in meshes]))
    elif not meshes:
        say("no mesh has had a worker yet")
    else:
        columns = ("mesh", "state", "model", "device", "adapters", "parked", "queued", "running", "oldest waits")
        print_table(columns, [_row(mesh) for mesh in meshes])
        for mesh in meshes:
            if mesh.memory_bytes:
                say(f"mesh {mesh.name}: {_memory(mesh)}")
            if mesh.trouble is not None:
                say(f"mesh {mesh.name}: the last worker did not start: {mesh.trouble}")


def is_alive(settings: Settings, mesh: str) -> bool:
    """Whether a mesh has a live worker."""
    return any(row.name == mesh and row.alive for row in _census(settings))


def _census(settings: Settings) -> list[MeshCensus]:
    with opened_journal(settings) as stores:
        return stores.meshes.census()


def _memory(mesh: MeshCensus) -> str:
    """Who holds how much of its device."""
    held = ", ".join(f"{name} {size / _GB:.2f}" for name, size in mesh.memory_held.items() if size)
    return f"{sum(mesh.memory_held.values()) / _GB:.2f} of {mesh.memory_bytes / _GB:.2f} GB of memory held: {held}"


def _row(mesh: MeshCensus) -> tuple[str, ...]:
    return (
        mesh.name,
        "alive" if mesh.alive else "no worker",
        mesh.base_model or "?",
        mesh.device or "?",
        str(mesh.num_adapters),
        str(mesh.num_parked),
        str(mesh.num_queued),
        str(mesh.num_running),
        "" if mesh.oldest_waits_s is None else f"{mesh.oldest_waits_s:.0f} s",
    )
