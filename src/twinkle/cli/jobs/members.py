"""The table of a sweep, with the best of it marked, and of a flow."""

from __future__ import annotations

from twinkle.cli.console import say
from twinkle.cli.table import print_table
from twinkle.wire.bodies.jobs_groups import JobMembersResponse
from twinkle.wire.sweeps import text_of

SWEEP, FLOW = "sweep", "flow"
_MOST_SHOWN = 50
_LONGEST_REASON = 80


def print_members(told: JobMembersResponse) -> None:
    """All members of a short sweep or flow; of a long sweep the best ones."""
    names = list(told.members[0].values or ()) if told.members else []
    members = told.members
    if len(members) > _MOST_SHOWN:
        sign = -1.0 if told.goal == "max" else 1.0
        judged = sorted((sign * one.metric, place) for place, one in enumerate(members) if one.metric is not None)
        members = [told.members[place] for _, place in judged[:_MOST_SHOWN]] or members[:_MOST_SHOWN]
    rows = [
        (
            "*" if one.is_best else "",
            *(text_of((one.values or {})[name]) for name in names),
            *(() if names else (one.name, one.kind)),
            one.state,
            "" if one.metric is None else f"{one.metric:.6g}",
            one.id,
            (one.failure or "")[:_LONGEST_REASON],
        )
        for one in members
    ]
    own = names or ["job", "kind"]
    print_table(("best", *own, "state", told.metric or "", "id", "reason"), rows)
    say(", ".join(f"{num} {state}" for state, num in told.counts.items()) + _left_out(told, len(members)))


def _left_out(told: JobMembersResponse, num_shown: int) -> str:
    more = len(told.members) - num_shown
    return f"; {more} more: twinkle jobs show --json" if more else ""
