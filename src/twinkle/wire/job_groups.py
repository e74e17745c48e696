"""Sweeps and flows as they are stored: the job that stands for all of them, and one job for each of them.

Everything follows from what was submitted. The ids of members follow from the group's, in the order of the sweep's
table, so that a reference to another job of a flow can be stored before any of them exists.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from twinkle.core.errors import InvalidInput
from twinkle.core.job import Dependency, JobKind, NewJob
from twinkle.wire.bodies.jobs_base import JobSpec, refusal_of_first
from twinkle.wire.bodies.jobs_flow import FlowFile, FlowSpec
from twinkle.wire.bodies.jobs_specs import SPECS
from twinkle.wire.bodies.jobs_sweep import SweepSpec
from twinkle.wire.flows import FlowStep, steps_of
from twinkle.wire.references import Spec, bound, references_in
from twinkle.wire.sweeps import Member, members_of

SpecT = TypeVar("SpecT", bound=JobSpec)


def expanded(new: NewJob) -> list[NewJob]:
    """A job and all that it is made of, itself first; any other job alone.

    Raises:
        InvalidInput: A parameter stands for nothing, a member's spec is wrong, or jobs wait for each other in a circle.
    """
    if new.kind is JobKind.SWEEP:
        return _sweep(new, _read(SweepSpec, new.spec), at="spec")
    if new.kind is JobKind.FLOW:
        return _flow(new, _read(FlowSpec, new.spec))
    return [new]


def member_id(group: str, part: int | str) -> str:
    """The id of a sweep's member, by its number, or of a flow's job, by its name."""
    return f"{group}~{part:04d}" if isinstance(part, int) else f"{group}~{part}"


def members(spec: SweepSpec) -> list[Member]:
    """A sweep's members, in the order of its table."""
    return members_of(spec.parameters, mode=spec.mode, runs=spec.runs, seed=spec.seed)


def flow_file_schema() -> dict[str, Any]:
    """The JSON schema of a flow's file, each job's ``spec`` by its ``kind``."""
    schema = FlowFile.model_json_schema()
    definitions = schema["$defs"]
    choices = []
    for kind, spec_class in sorted(SPECS.items()):
        if kind == JobKind.FLOW:
            continue
        spec = spec_class.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= spec.pop("$defs", {})
        definitions[spec_class.__name__] = spec
        of_kind = {"properties": {"kind": {"const": kind}}}
        choices.append({"if": of_kind, "then": {"properties": {"spec": {"$ref": f"#/$defs/{spec_class.__name__}"}}}})
    definitions["FlowJob"]["properties"]["kind"]["enum"] = sorted(set(SPECS) - {JobKind.FLOW.value})
    definitions["FlowJob"]["allOf"] = choices
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def sweep_of(stored: Spec) -> tuple[SweepSpec, list[Member]]:
    """A stored sweep, and its members."""
    sweep = _read(SweepSpec, stored)
    return sweep, members(sweep)


def filled(template: Mapping[str, Any], values: Mapping[str, Any], paths: Mapping[str, str]) -> Spec:
    """A template with one member's values, each at the path of its parameter."""
    spec = dict(template)
    for name, value in values.items():
        *parents, leaf = paths[name].split(".")
        inner = spec
        for parent in parents:
            inner[parent] = dict(inner.get(parent) or {})
            inner = inner[parent]
        inner[leaf] = value
    return spec


def path_of(parameter: str, spec_class: type[BaseModel], *, at: str) -> str:
    """The field that a sweep's parameter stands for: named whole, or by its last part if no other field has that.

    Raises:
        InvalidInput: No field has that name, or several do.
    """
    paths = list(_paths(spec_class))
    open_paths = [path.removesuffix("*") for path in paths if path.endswith("*")]
    if parameter in paths or any(parameter.startswith(path) and parameter != path for path in open_paths):
        return parameter
    ends = [path for path in paths if path.rpartition(".")[2] == parameter]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise InvalidInput(f"{at}.{parameter}", f"may be {' or '.join(ends)}; name the whole path")
    near = difflib.get_close_matches(parameter, [*paths, *(path.rpartition(".")[2] for path in paths)], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidInput(f"{at}.{parameter}", f"is no field of the template's spec{hint}")


def _paths(spec_class: type[BaseModel], within: str = "") -> Iterator[str]:
    """The paths of all fields; one that takes any keys ends with ``.*``."""
    for name, field in spec_class.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is not None:
            yield from _paths(inner, f"{within}{name}.")
        elif any(get_origin(kind) is dict for kind in kinds):
            yield f"{within}{name}.*"
        else:
            yield f"{within}{name}"


def _sweep(new: NewJob, sweep: SweepSpec, *, at: str) -> list[NewJob]:
    kind = _kind_of(sweep.template.kind, at=f"{at}.template.kind", beside=(JobKind.SWEEP, JobKind.FLOW))
    paths = {name: path_of(name, SPECS[kind], at=f"{at}.parameters") for name in sweep.parameters}
    template = {**sweep.template.spec, "dry_run": sweep.dry_run}
    jobs = []
    for member in members(sweep):
        spec = judged(SPECS[kind], filled(template, member.values, paths), at=f"{at}.template.spec ({member.label})")
        jobs.append(
            replace(
                new,
                id=member_id(new.id, member.index),
                kind=kind,
                spec=spec,
                client_id=None,
                name=member.label,
                parent=new.id,
                notify_url=None,
                # The same for all: runs of which one alone is to differ draw the same numbers.
                seed=new.drawn_seed,
                at_once=sweep.at_once,
            )
        )
    return [_waiting_for(new, jobs), *jobs]


def _flow(new: NewJob, flow: FlowSpec) -> list[NewJob]:
    ids = {name: member_id(new.id, name) for name in flow.jobs}
    jobs: list[NewJob] = []
    own: list[NewJob] = []
    for step in steps_of(flow):
        if flow.dry_run and step.after and any(references_in(step.spec)):
            continue  # What it will be given is known when the others have run.
        job = _step(new, step, ids, is_dry=flow.dry_run)
        at = f"spec.jobs.{step.name}.spec"
        job = replace(job, spec=judged(SPECS[job.kind], job.spec, at=at))
        jobs += _sweep(job, _read(SweepSpec, job.spec), at=at) if job.kind is JobKind.SWEEP else [job]
        own.append(job)
    return [_waiting_for(new, own), *jobs]


def _step(new: NewJob, step: FlowStep, ids: Mapping[str, str], *, is_dry: bool) -> NewJob:
    after = () if is_dry else tuple(Dependency(job=ids[name], condition=how.value) for name, how in step.after.items())
    return replace(
        new,
        id=ids[step.name],
        kind=_kind_of(step.kind, at=f"spec.jobs.{step.name}.kind", beside=(JobKind.FLOW,)),
        spec=bound(step.spec, ids) | {"dry_run": is_dry or bool(step.spec.get("dry_run"))},
        client_id=None,
        name=step.name,
        parent=new.id,
        notify_url=None,
        after=(*new.after, *after),
        seed=new.drawn_seed,
    )


def _waiting_for(new: NewJob, jobs: list[NewJob]) -> NewJob:
    return replace(new, after=tuple(Dependency(job=job.id, condition="any") for job in jobs))


def _kind_of(text: str, *, at: str, beside: tuple[JobKind, ...]) -> JobKind:
    known = sorted(set(SPECS) - {kind.value for kind in beside})
    if text not in known:
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidInput(at, f"{text!r} is none of {', '.join(known)}{hint}")
    return JobKind(text)


def judged(spec_class: type[JobSpec], spec: Spec, *, at: str) -> Spec:
    """A spec with its defaults; or, where it refers to results, as it is: such a field is judged when the job begins.

    Raises:
        InvalidInput: Another field is wrong, missing or unknown.
    """
    try:
        return _read(spec_class, spec).model_dump(mode="json", exclude_none=True)
    except ValidationError as error:
        open_fields = {reference.at for reference in references_in(spec, at="")}
        complaints = error.errors(include_url=False, include_context=False)
        counting = [one for one in complaints if not _is_open(one["loc"], open_fields)]
        if counting:
            raise refusal_of_first(spec_class, counting, within=at) from error
        return spec


def _read(spec_class: type[SpecT], spec: Spec) -> SpecT:
    return spec_class.model_validate_json(json.dumps(spec))


def _is_open(location: tuple[int | str, ...], open_fields: set[str]) -> bool:
    """Whether a complaint is about a field that holds a reference, or about several fields together."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
        if path in open_fields:
            return True
    return any(field.startswith(path) for field in open_fields)
