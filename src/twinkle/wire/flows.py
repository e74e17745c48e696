"""In which order a flow's jobs can run, and what each of them waits for: cycles and unknown names are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs_flow import Condition, FlowJob, FlowSpec
from twinkle.wire.references import nearest, references_in


@dataclass(frozen=True, kw_only=True)
class FlowStep:
    """One job of a flow and everything it waits for, by name; what its spec refers to included."""

    name: str
    kind: str
    spec: dict[str, Any]
    after: Mapping[str, Condition]


def steps_of(flow: FlowSpec) -> list[FlowStep]:
    """The jobs, each behind those that it waits for; those that wait for the same stand as they were written.

    Raises:
        InvalidInput: A name is not known, or jobs wait for each other in a circle.
    """
    steps = {
        name: FlowStep(name=name, kind=job.kind, spec=job.spec, after=_after(flow, name, job))
        for name, job in flow.jobs.items()
    }
    ordered: dict[str, FlowStep] = {}
    for name in steps:
        _visit(name, steps, ordered, path=())
    return list(ordered.values())


def _after(flow: FlowSpec, name: str, job: FlowJob) -> dict[str, Condition]:
    after = dict(job.after)
    for waited_for in after:
        _know(flow, waited_for, at=f"jobs.{name}.after")
    for reference in references_in(job.spec, at=f"jobs.{name}.spec"):
        _know(flow, reference.job, at=reference.at)
        # A result is there for certain only where the job ended well.
        after[reference.job] = Condition.OK
    return after


def _know(flow: FlowSpec, name: str, *, at: str) -> None:
    if name not in flow.jobs:
        raise InvalidInput(at, f"the flow has no job {name!r}{nearest(name, flow.jobs)}")


def _visit(name: str, steps: Mapping[str, FlowStep], ordered: dict[str, FlowStep], path: tuple[str, ...]) -> None:
    if name in ordered:
        return
    if name in path:
        circle = [*path[path.index(name) :], name]
        raise InvalidInput("jobs", f"wait for each other in a circle: {' after '.join(circle)}; take one `after` out")
    for waited_for in steps[name].after:
        _visit(waited_for, steps, ordered, (*path, name))
    ordered[name] = steps[name]
