"""Texts of a command line, an environment or a file as values of the types that arguments have."""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from twinkle.core.errors import ConfigError

TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "0"})
NONE = frozenset({"none", "null", "~"})


def as_type(value: Any, kind: Any, name: str) -> Any:
    """A value as a field's type.

    Raises:
        ConfigError: It is none; the message names the argument and where it was said.
    """
    if get_origin(kind) in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in NONE):
            return None
        kind = next(option for option in get_args(kind) if option is not types.NoneType)
    if isinstance(value, bool) and kind is not bool:
        # What stands alone on a command line is true; a value was forgotten behind it.
        raise ConfigError(f"{name}: wants a value; write it behind the name")
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _wrong(name, value, f"one of {', '.join(map(str, get_args(kind)))}")
        return value
    if get_origin(kind) is list:
        return _as_list(value, name)
    if get_origin(kind) is dict:
        return _as_dict(value, name)
    return _as_plain(value, kind, name)


def guessed(value: Any) -> Any:
    """A text as what it looks like: a truth value, nothing, a number, a list with commas, else a text."""
    if not isinstance(value, str):
        return value
    low = value.lower()
    if low in {"true", "yes", "on"} | {"false", "no", "off"}:
        return low in TRUE
    if low in NONE:
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return [guessed(item.strip()) for item in value.split(",")] if "," in value else value


def _as_plain(value: Any, kind: type, name: str) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).lower()
        if text not in TRUE | FALSE:
            raise _wrong(name, value, "true or false")
        return text in TRUE
    if kind is str:
        return ",".join(value) if isinstance(value, list) else str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _wrong(name, value, "a number") from None
    if kind is float:
        return number
    if not number.is_integer():
        raise _wrong(name, value, "a whole number")
    return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)


def _as_list(value: Any, name: str) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    text = str(value).strip()
    if text.startswith("["):
        try:
            return [str(item) for item in json.loads(text)]
        except ValueError:
            raise _wrong(name, value, "a JSON list; write it so, or with commas and without brackets") from None
    return [item.strip() for item in text.split(",") if item.strip()]


def _as_dict(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        raise _wrong(name, value, "a JSON object") from None
    if not isinstance(found, dict):
        raise _wrong(name, value, "a JSON object")
    return found


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{name}: {value!r} is not {wanted}")
