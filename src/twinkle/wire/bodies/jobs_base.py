"""What the specs of all kinds of jobs share: they take what they know and nothing else, and say what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.base import Identifier, RequestBody, complaint, path_of

MAX_PRIORITY = 100

_UNKNOWN = "extra_forbidden"

PartT = TypeVar("PartT", bound="JobPart")


def _no_path(text: str) -> str:
    if "/" in text:
        raise ValueError("must be the id of a file that was uploaded, not a path: files are read on the server")
    return text


FileId = Annotated[Identifier, AfterValidator(_no_path)]
"""A file of the tenant's, as ``POST /v1/files`` names it."""
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Among a tenant's own work, the highest first; interactive work that says nothing has 0."""


class JobPart(RequestBody):
    """Base of everything a job's request is made of: an unknown key is refused, with the nearest known one."""

    model_config = ConfigDict(extra="forbid")


class JobSpec(JobPart):
    """Base of what one kind of jobs is asked to do; what all kinds have in common is in ``JobRequest``."""

    dry_run: bool = False
    """Only say what it would take: tokens, steps, memory, time."""


def parse_part(part_class: type[PartT], raw: bytes, *, within: str = "") -> PartT:
    """Reads a spec or a part of one; ``within`` is where in the request it stands.

    Raises:
        InvalidInput: It names the first field at fault with its whole path.
    """
    try:
        return part_class.model_validate_json(raw)
    except ValidationError as error:
        raise refusal_of(part_class, error, within=within) from error


def refusal_of(part_class: type[JobPart], error: ValidationError, *, within: str = "") -> InvalidInput:
    """Turns pydantic's first complaint about a part into ours; an unknown key is behind most of the others."""
    return refusal_of_first(part_class, error.errors(include_url=False, include_context=False), within=within)


def refusal_of_first(part_class: type[JobPart], complaints: Sequence[ErrorDetails], *, within: str) -> InvalidInput:
    """As :func:`refusal_of`, of those complaints that count."""
    first = next((one for one in complaints if one["type"] == _UNKNOWN), complaints[0])
    message = complaint(first)
    if first["type"] == _UNKNOWN:
        message = f"is not known here{_hint(str(first['loc'][-1]), _known_at(part_class, first['loc'][:-1]))}"
    return InvalidInput(f"{within}.{path_of(first['loc'])}".strip(".") or "body", message)


def _hint(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"


def _known_at(part_class: type[BaseModel], location: tuple[int | str, ...]) -> set[str]:
    """The fields of what stands there; of several that may, those of all."""
    here: set[type[BaseModel]] = {part_class}
    for step in location:
        below = [one.model_fields[step] for one in here if isinstance(step, str) and step in one.model_fields]
        if below:  # else a place in a list, or the name of one side of a union
            here = {model for field in below for model in _models_in(field.annotation)}
    return {name for one in here for name in one.model_fields}


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
