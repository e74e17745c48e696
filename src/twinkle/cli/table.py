"""Tables for people; machines ask for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

_UNLIMITED = 1 << 20


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their column names."""
    print_whole(plain_console(), new_table(columns, rows))


def new_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> Table:
    """A table of which nothing is left out: what does not fit into a terminal's width goes on in the next line."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def plain_console() -> Console:
    """Standard output, where text means what it says: rich would make an emoji of the middle of ``ID:train:0``."""
    return Console(highlight=False, markup=False, emoji=False)


def print_whole(console: Console, content: RenderableType) -> None:
    """Print as wide as the terminal; as wide as the content where there is none, for which rich assumes 80 columns."""
    if not console.is_terminal:
        options = console.options.update(max_width=_UNLIMITED)
        console.width = max(1, Measurement.get(console, options, content).maximum)
    console.print(content)


def minute_of(unix_s: float) -> str:
    """A point in time as tables show it, to the minute."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
