"""How long a service needed to go on, measured in the journal and told to whoever reads the test's output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from harness.polling import wait_for

Query = Callable[[str], Sequence[tuple]]


def running_again_s(query: Query, died_at: float, *, deadline_s: float = 60.0) -> float:
    """From a death (Unix seconds) until an operation that it interrupted was started again."""

    def look() -> Sequence[tuple]:
        return query(f"SELECT MIN(started_at) FROM operation WHERE attempts > 1 AND started_at > {died_at}")

    rows = wait_for(
        lambda: [row for row in look() if row[0] is not None], what="another attempt", deadline_s=deadline_s
    )
    return float(rows[0][0]) - died_at


def finished_again_s(query: Query, since: float, *, count: int = 1, deadline_s: float = 60.0) -> float:
    """From a moment (Unix seconds) until so many operations accepted before it or after have finished after it."""

    def look() -> list[tuple]:
        found = query(
            f"SELECT finished_at FROM operation WHERE finished_at > {since} ORDER BY finished_at LIMIT {count}"
        )
        return list(found) if len(found) >= count else []

    return float(wait_for(look, what=f"{count} operations end", deadline_s=deadline_s)[-1][0]) - since


def tell(what: str, seconds: Sequence[float]) -> None:
    """One line of the table in ``docs/recovery.md``: ``pytest -s`` shows it."""
    ordered = sorted(seconds)
    median = ordered[len(ordered) // 2]
    print(f"\nrecovery | {what} | median {median:.2f} s | worst {ordered[-1]:.2f} s | {len(ordered)} times")


def now() -> float:
    return time.time()
