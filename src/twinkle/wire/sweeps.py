"""Which members a sweep has: pure arithmetic over its parameters, the same for whoever asks and whenever.

A grid takes every combination, the first parameter changing slowest. A random sweep draws: without putting back where
all parameters are choices, else each member's values by hashing the seed with the member's number and the parameter.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs_sweep import MAX_MEMBERS, ParameterRange, SweepMode, Value

_DIGITS = ".6g"
"""Drawn and spaced values are rounded to what people read and type: the same on every machine, short in a name."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One run of a sweep: its number, and the values that its template is filled with."""

    index: int
    values: Mapping[str, Value]

    @property
    def label(self) -> str:
        """Its values as its name and a table show them."""
        return ",".join(f"{name}={text_of(value)}" for name, value in self.values.items())


def text_of(value: Value) -> str:
    """A parameter's value as people wrote it."""
    return value if isinstance(value, str) else json.dumps(value)


def members_of(
    parameters: Mapping[str, Sequence[Value] | ParameterRange], *, mode: SweepMode, runs: int | None, seed: int
) -> list[Member]:
    """All members in order.

    Raises:
        InvalidInput: There are too many, or fewer than ``runs`` asks for.
    """
    if mode is SweepMode.RANDOM and any(isinstance(values, ParameterRange) for values in parameters.values()):
        assert runs is not None, "the body refuses a random sweep without a number of runs"
        return [Member(index=number, values=_drawn(parameters, seed, number)) for number in range(runs)]
    choices = {name: _spaced(name, values) for name, values in parameters.items()}
    num_combinations = math.prod(len(values) for values in choices.values())
    if mode is SweepMode.GRID:
        _refuse_too_many(num_combinations)
        picked = list(itertools.product(*choices.values()))
    else:
        assert runs is not None, "the body refuses a random sweep without a number of runs"
        picked = _without_putting_back(list(choices.values()), num_combinations, runs=runs, seed=seed)
    return [
        Member(index=number, values=dict(zip(choices, values, strict=True))) for number, values in enumerate(picked)
    ]


def fraction_of(*parts: object) -> float:
    """A number from 0 until before 1, evenly spread over whatever it is made of."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def _refuse_too_many(num_members: int) -> None:
    if num_members > MAX_MEMBERS:
        raise InvalidInput(
            "parameters",
            f"make {num_members} members, and a sweep has at most {MAX_MEMBERS}; give fewer values, or draw some:"
            ' "mode": "random" with "runs"',
        )


def _spaced(name: str, values: Sequence[Value] | ParameterRange) -> list[Value]:
    """The values of a grid."""
    if not isinstance(values, ParameterRange):
        return list(values)
    if values.count is None:
        raise InvalidInput(f"parameters.{name}.count", "is missing: a grid needs to know how many values to take")
    if values.count == 1:
        return [_at(values, 0.0)]
    spaced = [_at(values, step / (values.count - 1)) for step in range(values.count)]
    return list(dict.fromkeys(spaced))


def _at(values: ParameterRange, fraction: float) -> Value:
    match values.scale:
        case "log":
            return float(format(values.low * (values.high / values.low) ** fraction, _DIGITS))
        case "lin":
            return float(format(values.low + (values.high - values.low) * fraction, _DIGITS))
        case "int":
            return round(values.low + (values.high - values.low) * fraction)


def _drawn(parameters: Mapping[str, Sequence[Value] | ParameterRange], seed: int, number: int) -> dict[str, Value]:
    drawn: dict[str, Value] = {}
    for name, values in parameters.items():
        fraction = fraction_of(seed, number, name)
        if not isinstance(values, ParameterRange):
            drawn[name] = values[int(fraction * len(values))]
        elif values.scale == "int":
            drawn[name] = int(values.low) + int(fraction * (int(values.high) - int(values.low) + 1))
        else:
            drawn[name] = _at(values, fraction)
    return drawn


def _without_putting_back(
    choices: list[list[Value]], num_combinations: int, *, runs: int, seed: int
) -> list[tuple[Value, ...]]:
    if runs > num_combinations:
        raise InvalidInput("runs", f"must be at most {num_combinations}, as many as there are combinations, not {runs}")
    taken: dict[int, None] = {}
    draw = 0
    while len(taken) < runs:
        taken.setdefault(int(fraction_of(seed, draw) * num_combinations))
        draw += 1
    return [_combination(choices, place) for place in taken]


def _combination(choices: list[list[Value]], place: int) -> tuple[Value, ...]:
    """The combination at a place of the grid, without making the grid."""
    values: list[Value] = []
    for of_one in reversed(choices):
        place, digit = divmod(place, len(of_one))
        values.append(of_one[digit])
    return tuple(reversed(values))
