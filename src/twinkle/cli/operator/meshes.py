"""``twinkle meshes``: meshes come and go, straight in the journal; workers and housekeeping do what it says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from twinkle.cli.console import say
from twinkle.cli.embedded.stack import flag_of, parse_meshes
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import print_table
from twinkle.core.errors import Conflict, TransientError
from twinkle.core.settings import Settings
from twinkle.storage.journal.meshes import MeshStatus

_POLL_S = 0.2


def list_meshes(settings: Settings, *, as_json: bool) -> None:
    """Print one row a mesh."""
    with opened_journal(settings) as stores:
        meshes = stores.meshes.all()
    facts = [_facts(mesh) for mesh in meshes]
    if as_json:
        say(json.dumps(facts))
    elif not facts:
        say("there is no mesh yet")
    else:
        columns = tuple(facts[0])
        print_table(columns, [tuple("" if value is None else str(value) for value in row.values()) for row in facts])


def add_mesh(settings: Settings, mesh: str, *, device: str, ranks: str | None) -> None:
    """Ask for a mesh, or let one that is being drained stay.

    Raises:
        ConfigError: A name, a device or the number of ranks is none.
    """
    flag = f"{mesh}={device}" + ("" if ranks is None else f",ranks={ranks}")
    [plan] = parse_meshes([flag], settings)
    with opened_journal(settings) as stores:
        stores.moves.ask_for(mesh, flag_of(plan))
        stores.audit.note(None, "mesh_add", mesh=mesh, device=device)
    say(f"mesh {mesh} is asked for; `twinkle serve` starts its worker, other stacks one of their own with this name")


def drain_mesh(settings: Settings, mesh: str, *, to: str | None, undo: bool) -> None:
    """Begin, or take back. Raises as the journal does."""
    with opened_journal(settings) as stores:
        if undo:
            stores.moves.restore(mesh)
            stores.audit.note(None, "mesh_restore", mesh=mesh)
            say(f"mesh {mesh} stays")
            return
        stores.moves.drain(mesh, to_mesh=to)
        stores.audit.note(None, "mesh_drain", mesh=mesh)
        others = [other for other in stores.meshes.all() if _may_take(other, stores.meshes.all(), mesh)]
    say(f"mesh {mesh} takes nothing new, and what is on it leaves; `twinkle meshes list` shows how much is left")
    if not others:
        say("no other mesh of its model has a worker now: everything stays until one has")


def remove_mesh(settings: Settings, mesh: str, *, timeout_s: float) -> None:
    """Drain it, wait until nothing is on it and no worker holds it, forget it.

    Raises:
        Conflict: It is not empty yet, or a worker holds it that nobody stops.
    """
    with opened_journal(settings) as stores:
        stores.moves.drain(mesh)
        stores.moves.give_back(mesh)
        refusal: list[Conflict] = []

        def is_removed() -> bool:
            try:
                stores.moves.remove(mesh)
            except Conflict as error:
                refusal[:] = [error]
                return False
            return True

        if not _within(timeout_s, is_removed):
            raise refusal[0]
        stores.audit.note(None, "mesh_remove", mesh=mesh)
    say(f"mesh {mesh} is gone")


def move_run(settings: Settings, run: str, *, to: str, timeout_s: float) -> None:
    """Move one and wait until it is there.

    Raises:
        TransientError: It is still on its way.
    """
    with opened_journal(settings) as stores:
        started = time.monotonic()
        if not stores.moves.begin(run, to):
            say(f"{run} is on mesh {to}")
            return
        if not _within(timeout_s, lambda: stores.moves.place_of(run) == to):
            raise TransientError(f"{run} is still on its way to {to}: what runs of it there ends first")
    say(f"{run} is on mesh {to} after {time.monotonic() - started:.1f} s")


def _within(timeout_s: float, is_so: Callable[[], bool]) -> bool:
    ends_at = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() >= ends_at:
            return False
        time.sleep(_POLL_S)
    return True


def _may_take(other: MeshStatus, meshes: list[MeshStatus], drained: str) -> bool:
    ours = next(mesh.capabilities for mesh in meshes if mesh.name == drained)
    if other.name == drained or other.is_draining or not other.alive or other.capabilities is None or ours is None:
        return False
    return ours.why_not_on(other.capabilities) is None


def _facts(mesh: MeshStatus) -> dict[str, object]:
    capabilities = mesh.capabilities
    is_starting = mesh.announced is not None and not mesh.alive
    state = "draining" if mesh.is_draining else "alive" if mesh.alive else "starting" if is_starting else "no worker"
    return {
        "mesh": mesh.name,
        "state": state,
        "model": None if capabilities is None else capabilities.base_model,
        "device": None if capabilities is None else capabilities.device,
        "ranks": None if capabilities is None else capabilities.ranks,
        "adapters": mesh.num_adapters,
        "live": mesh.num_live,
        "leaving": mesh.num_moving,
        "asked_for": mesh.asked_for or None,
        "trouble": mesh.trouble,
    }
