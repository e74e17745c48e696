"""``--sweep``: any kind of job once for each combination of some values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.cli.jobs.options import Shared
from twinkle.core.errors import ConfigError
from twinkle.wire.bodies.jobs_sweep import ParameterRange, Value

_SCALES = ("log", "lin", "int")
_FEWEST_PARTS, _MOST_PARTS = 3, 4


def is_sweep(shared: Shared) -> bool:
    """Whether one was asked for.

    Raises:
        ConfigError: Something was said of a sweep and no parameter given.
    """
    beside = {
        "--sweep-mode": shared.sweep_mode,
        "--sweep-runs": shared.sweep_runs,
        "--at-once": shared.at_once,
        "--metric": shared.metric,
        "--goal": shared.goal,
    }
    said = [flag for flag, value in beside.items() if value is not None]
    if said and not shared.sweep:
        raise ConfigError(f"{said[0]} says something of a sweep, and there is none; add --sweep FIELD=VALUES")
    return bool(shared.sweep)


def sweep_spec(kind: str, spec: Mapping[str, object], shared: Shared) -> dict[str, object]:
    """The spec of kind ``sweep`` with a job of this kind as its template.

    Raises:
        ConfigError: A parameter is not written as it must be.
    """
    parameters: dict[str, object] = {}
    at_once = shared.at_once
    for text in shared.sweep or ():
        if text.startswith("%"):
            at_once = _whole(text, text[1:])
            continue
        name, separator, values = text.partition("=")
        if not separator or not name or not values:
            raise ConfigError(f"--sweep {text}: write FIELD=8,16,32, FIELD=log:1e-5:1e-3:5, or %N for how many at once")
        if name in parameters:
            raise ConfigError(f"--sweep {text}: {name} is given twice; list all its values at once")
        parameters[name] = values_of(text, values)
    if not parameters:
        raise ConfigError("--sweep needs at least one FIELD=VALUES beside %N")
    said: dict[str, object | None] = {
        "mode": shared.sweep_mode,
        "runs": shared.sweep_runs,
        "seed": shared.sweep_seed,
        "at_once": at_once,
        "metric": shared.metric,
        "goal": shared.goal,
        "require": shared.require,
    }
    given = {name: value for name, value in said.items() if value is not None}
    return {"template": {"kind": kind, "spec": dict(spec)}, "parameters": parameters, **given}


def values_of(text: str, values: str) -> Sequence[Value] | dict[str, Any]:
    """``8,16,32`` as a list; ``log:LOW:HIGH:COUNT``, ``lin:...`` and ``int:...`` as a range.

    Raises:
        ConfigError: A range has a number too few or too many.
    """
    scale, *bounds = values.split(":")
    if scale not in _SCALES or not bounds:
        return [_value(one) for one in values.split(",")]
    if not _FEWEST_PARTS <= len(bounds) + 1 <= _MOST_PARTS:
        raise ConfigError(f"--sweep {text}: a range is {scale}:LOW:HIGH:COUNT (a random sweep needs no count)")
    try:
        low, high = float(bounds[0]), float(bounds[1])
        count = int(bounds[2]) if len(bounds) + 1 == _MOST_PARTS else None
        found = ParameterRange.model_validate({"scale": scale, "low": low, "high": high, "count": count})
    except ValueError as error:
        raise ConfigError(f"--sweep {text}: {scale}:LOW:HIGH:COUNT needs numbers, LOW below HIGH") from error
    return found.model_dump(exclude_none=True)


def _value(text: str) -> Value:
    """A number or a truth value if it looks like one, else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    return value if isinstance(value, bool | int | float | str) else text


def _whole(text: str, number: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--sweep {text}: write %N, where N is how many run at once")
    return int(number)
