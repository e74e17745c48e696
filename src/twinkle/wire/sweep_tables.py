"""What came of a sweep so far: a line for each member, and which of them is best by the metric that was named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.core.job import JobKind, JobMember, JobState
from twinkle.wire.bodies.jobs_sweep import Goal, SweepSpec, Value
from twinkle.wire.sweeps import Member

Result = Mapping[str, Any]

_LOSSES = (Goal.MIN, ("best_eval_loss", "eval_loss", "loss"))
_REWARDS = (Goal.MAX, ("best_eval_reward", "eval_reward", "reward"))
_OWN_METRICS: Mapping[str, tuple[Goal, tuple[str, ...]]] = {
    JobKind.SUPERVISED: _LOSSES,
    JobKind.PREFERENCE: _LOSSES,
    JobKind.DISTILL: _LOSSES,
    JobKind.REINFORCEMENT: _REWARDS,
}
"""What members are compared by where nothing was named: the first of these that a result has."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table. ``metric`` is there as soon as the member tells it, also while it runs."""

    index: int
    id: str
    name: str
    values: Mapping[str, Value]
    state: JobState
    metric: float | None
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """All lines in order. ``best`` is a line of a member that has succeeded; of two that are equal the first one."""

    metric: str | None
    goal: Goal
    lines: Sequence[Line]
    best: Line | None

    @property
    def num_by_state(self) -> dict[str, int]:
        """How many members are in which state, those states alone that there are."""
        return dict(sorted(Counter(line.state.value for line in self.lines).items()))


def table_of(spec: SweepSpec, members: Sequence[Member], standings: Sequence[JobMember]) -> SweepTable:
    """The table of a sweep; both sequences are in the order of the members."""
    goal, names = _OWN_METRICS.get(spec.template.kind, (Goal.MIN, ()))
    names = names if spec.metric is None else (spec.metric,)
    goal = spec.goal or goal
    told = [standing.result or standing.progress for standing in standings]
    metric = next((name for name in names if any(number_at(one, name) is not None for one in told)), spec.metric)
    lines = [
        Line(
            index=member.index,
            id=standing.id,
            name=standing.name,
            values=member.values,
            state=standing.state,
            metric=None if metric is None else number_at(facts, metric),
            failure=standing.failure,
        )
        for member, standing, facts in zip(members, standings, told, strict=True)
    ]
    best = _best(lines, goal)
    return SweepTable(metric=metric, goal=goal, lines=lines, best=best)


def number_at(facts: Result, path: str) -> float | None:
    """A finite number of a result by its name; ``a.b`` is one within an object."""
    found: Any = facts
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


def _best(lines: Sequence[Line], goal: Goal) -> Line | None:
    sign = 1.0 if goal is Goal.MIN else -1.0
    judged = [
        (sign * line.metric, line.index, line)
        for line in lines
        if line.state is JobState.SUCCEEDED and line.metric is not None
    ]
    return min(judged, key=lambda one: one[:2])[-1] if judged else None
