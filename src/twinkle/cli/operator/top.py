"""``twinkle top``: who waits for each mesh and who was served, straight from the journal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import new_table, plain_console, print_whole
from twinkle.core.clock import SystemClock
from twinkle.core.processors import PROCESSORS_MESH
from twinkle.core.settings import Settings
from twinkle.scheduler.overview import MeshOverview, TenantLine, overview_of
from twinkle.storage.stores import Stores

_COLUMNS = ("tenant", "weight", "share", "adapters", "operations", "samples", "running", "tokens waiting", "state")


def show_top(settings: Settings, *, every_s: float, once: bool, as_json: bool) -> None:
    """Print the queues, again and again until Ctrl-C unless ``once`` or where the output is not a terminal."""
    console = plain_console()
    with opened_journal(settings) as stores:
        if as_json:
            say(json.dumps([asdict(mesh) for mesh in _overviews(stores)]))
        elif once or not console.is_terminal:
            print_whole(console, _screen(_overviews(stores)))
        else:
            _refresh(console, stores, every_s)


def _refresh(console: Console, stores: Stores, every_s: float) -> None:
    try:
        with Live(_screen(_overviews(stores)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(_screen(_overviews(stores)), refresh=True)
    except KeyboardInterrupt:
        return


def _overviews(stores: Stores) -> list[MeshOverview]:
    now = SystemClock().now()
    return [overview_of(stores.queues.look(mesh.name), now=now) for mesh in stores.meshes.all()]


def _screen(meshes: list[MeshOverview]) -> RenderableType:
    if not meshes:
        return "no mesh has had a worker yet"
    return Group(*(_table(mesh) for mesh in meshes))


def _table(mesh: MeshOverview) -> Table:
    title = f"{mesh.mesh}: training {_rate(mesh.training_rate)}, sampling {_rate(mesh.sampling_rate)}"
    if mesh.mesh == PROCESSORS_MESH:
        title = f"{mesh.mesh}: data sets and loaders"
    if not mesh.is_exact:
        title += " (a long queue: samples and tokens are lower bounds)"
    return new_table(_COLUMNS, [_row(line) for line in mesh.tenants], title=title)


def _row(line: TenantLine) -> tuple[str, ...]:
    return (
        line.tenant,
        f"{line.weight:g}",
        f"{line.share:.0%}",
        str(line.num_adapters_waiting),
        str(line.num_operations),
        str(line.num_samples),
        str(line.num_running),
        str(line.tokens_waiting),
        f"rate limited for {line.paused_for_s:.0f} s" if line.paused_for_s else "",
    )


def _rate(tokens_per_s: float | None) -> str:
    return "not measured yet" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"
