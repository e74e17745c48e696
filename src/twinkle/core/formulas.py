"""Arithmetic that a tenant wrote as a text: read once, judged, and computed without ever running code.

What it may hold is numbers, names, ``+ - * / ^`` and a few functions; all is computed in floats, whose size is bounded,
and the length, the number of parts and the depth are bounded before anything is computed.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from twinkle.core.errors import InvalidInput

MAX_CHARACTERS = 1000
MAX_PARTS = 200
MAX_DEPTH = 40


def _power(base: float, exponent: float) -> float:
    # The operator gives complex numbers for roots of negative ones.
    return math.pow(base, exponent)


_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.Pow: _power,
    }
)
_UNARY: Mapping[type[ast.unaryop], Callable[[float], float]] = MappingProxyType(
    {ast.UAdd: operator.pos, ast.USub: operator.neg}
)
FUNCTIONS: Mapping[str, tuple[Callable[..., float], int, int]] = MappingProxyType(
    {
        "min": (min, 1, MAX_PARTS),
        "max": (max, 1, MAX_PARTS),
        "abs": (abs, 1, 1),
        "floor": (lambda value: float(math.floor(value)), 1, 1),
        "ceil": (lambda value: float(math.ceil(value)), 1, 1),
        "exp": (math.exp, 1, 1),
        "sqrt": (math.sqrt, 1, 1),
        "log": (math.log, 1, 1),
    }
)
"""Each with the fewest and the most arguments it takes."""


class FormulaFailed(Exception):
    """A formula has no value for these numbers: a division by zero, a root of a negative number, no finite result."""


@dataclass(frozen=True)
class Formula:
    """A formula that was judged.

    Attributes:
        text: As it was written.
        names: What it asks values of.
    """

    text: str
    names: frozenset[str]
    _root: ast.expr

    def value(self, values: Mapping[str, float]) -> float:
        """What it is for the values of its names.

        Raises:
            FormulaFailed: It has no finite value for them.
        """
        try:
            result = _compute(self._root, values)
        except (ArithmeticError, ValueError) as error:
            raise FormulaFailed(f"{self.text!r} has no value: {error}") from error
        if not math.isfinite(result):
            raise FormulaFailed(f"{self.text!r} has no finite value")
        return result


def read_formula(text: str, *, field: str, names: Collection[str]) -> Formula:
    """A formula over some names.

    Raises:
        InvalidInput: It is none, is too large, or asks for a name that is not there; it says what.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(field, f"has {len(text)} characters, more than {MAX_CHARACTERS}")
    try:
        # The formulas' ^ is a power; Python's binds weaker than a sum.
        root = ast.parse(text.replace("^", "**").strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput(field, f"is no formula: {text!r}") from error
    found: set[str] = set()
    _judge(root, field, frozenset(names), found)
    return Formula(text, frozenset(found), root)


def _judge(root: ast.expr, field: str, names: frozenset[str], found: set[str]) -> None:
    waiting: list[tuple[ast.expr, int]] = [(root, 1)]
    num_parts = 0
    while waiting:
        node, depth = waiting.pop()
        num_parts += 1
        if num_parts > MAX_PARTS or depth > MAX_DEPTH:
            raise InvalidInput(field, f"has more than {MAX_PARTS} parts, or is nested deeper than {MAX_DEPTH}")
        waiting += [(part, depth + 1) for part in _parts(node, field, names, found)]


def _parts(node: ast.expr, field: str, names: frozenset[str], found: set[str]) -> list[ast.expr]:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if abs(value) > 1e300:
                raise InvalidInput(field, "has a number that is too large")
            return []
        case ast.Name(id=name):
            if name not in names:
                raise InvalidInput(field, f"asks for {name!r}, which is none of its graders; {_hint(name, names)}")
            found.add(name)
            return []
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return [left, right]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return [operand]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            if name not in FUNCTIONS:
                raise InvalidInput(field, f"calls {name!r}; {_hint(name, FUNCTIONS)}")
            _, fewest, most = FUNCTIONS[name]
            if not fewest <= len(arguments) <= most:
                raise InvalidInput(field, f"calls {name} with {len(arguments)} values")
            return list(arguments)
    raise InvalidInput(
        field, f"may hold numbers, its graders' names, + - * / ^ and {', '.join(FUNCTIONS)}, not {_shown(node)}"
    )


def _compute(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return float(values[name])
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_compute(left, values), _compute(right, values))
        case ast.UnaryOp(op=sign, operand=operand):
            return _UNARY[type(sign)](_compute(operand, values))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return float(FUNCTIONS[name][0](*[_compute(argument, values) for argument in arguments]))
    raise AssertionError("what was judged holds nothing else")


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known)) or 'none'}"


def _shown(node: ast.expr) -> str:
    return type(node).__name__
