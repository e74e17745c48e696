"""``${name.result.checkpoint}`` in a spec: what another job's result has to say, put in as data and never as code.

In a flow the first part is a job's name; what is stored has the job's id there, so that a reference means the same
job for ever and a text that only looks like one is left alone. A value that is nothing but a reference takes the type
of what it refers to; within a longer text it becomes text. ``$${`` is a plain ``${``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.core.errors import InvalidInput

_MARK = re.compile(r"\$?\$\{([^{}]*)\}")
_FIRST_PARTS = ("result", "best", "id")
Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One reference: where in the spec it stands, whose result it means, and the path within it."""

    at: str
    job: str
    path: tuple[str, ...]


def references_in(spec: object, *, at: str = "spec") -> Iterator[Reference]:
    """All references of a spec, in the order in which they stand there.

    Raises:
        InvalidInput: One says no field of a result.
    """
    for place, text in _texts(spec, at):
        for mark in _MARK.finditer(text):
            if not mark[0].startswith("$$"):
                yield _reference(mark[1], place)


def bound(spec: Spec, ids: Mapping[str, str]) -> Spec:
    """The spec with ids where references have names; every name must be known."""

    def with_id(mark: re.Match[str]) -> str:
        if mark[0].startswith("$$"):
            return mark[0][1:]
        reference = _reference(mark[1], "spec")
        return "${" + ".".join((ids[reference.job], *reference.path)) + "}"

    return {key: _mapped(value, lambda text: _MARK.sub(with_id, text)) for key, value in spec.items()}


def jobs_referred_to(spec: object, ids: Iterable[str]) -> set[str]:
    """Which of these jobs a stored spec refers to."""
    known = set(ids)
    return {job for _, text in _texts(spec, "") for mark in _MARK.finditer(text) if (job := _job_of(mark)) in known}


def resolved(spec: Spec, results: Mapping[str, Spec]) -> Spec:
    """A stored spec with the values that its references mean; what refers to no job of ``results`` is left as it is.

    Raises:
        InvalidInput: A result has no such field.
    """

    def value_of(text: str) -> object:
        whole = _MARK.fullmatch(text)
        if whole is not None and _job_of(whole) in results:
            return _look_up(whole[1], results)
        return _MARK.sub(
            lambda mark: _as_text(_look_up(mark[1], results)) if _job_of(mark) in results else mark[0], text
        )

    return {key: _mapped(value, value_of) for key, value in spec.items()}


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` if one of the known words is near, else the known ones, as the end of a complaint."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there is {', '.join(map(repr, words))}" if words else ""


def _reference(inner: str, at: str) -> Reference:
    job, *path = (part.strip() for part in inner.split("."))
    if not job or not path or not all(path):
        raise InvalidInput(at, f"${{{inner}}} does not say what of which job: write ${{name.result.checkpoint}}")
    if path[0] not in _FIRST_PARTS:
        raise InvalidInput(at, f"${{{inner}}}: a job has no {path[0]!r}{nearest(path[0], _FIRST_PARTS)}")
    return Reference(at=at, job=job, path=tuple(path))


def _job_of(mark: re.Match[str]) -> str:
    return mark[1].split(".", 1)[0].strip()


def _look_up(inner: str, results: Mapping[str, Spec]) -> object:
    reference = _reference(inner, "spec")
    first, *rest = reference.path
    if first == "id":
        return reference.job
    found: object = results[reference.job]
    for part in ["best", *rest] if first == "best" else rest:
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
            continue
        if not isinstance(found, dict) or part not in found:
            known = found if isinstance(found, dict) else ()
            raise InvalidInput("spec", f"${{{inner}}}: the job's result has no {part!r}{nearest(part, known)}")
        found = found[part]
    return found


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(value: object, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{at}[{number}]")


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value
