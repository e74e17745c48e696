"""A call's arguments as JSON has them: numbers of any library, data sets, adapters' configs; never code.

Nothing is imported to recognise a value: what is not loaded cannot have made it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
from pydantic import BaseModel

from twinkle.core.errors import InvalidInput

TYPE_KEY = "_TWINKLE_TYPE_"
SLICE_KEY = "_slice_type_"

_KNOWN_LIBRARIES = ("twinkle", "torch")
_PLAIN = frozenset({int, float, str, bool, type(None)})


def encode_arguments(arguments: Mapping[str, object]) -> bytes:
    """The JSON object of a call.

    Raises:
        InvalidInput: An argument is a function, a class or an object that only this process can hold; names it.
    """
    return json.dumps({name: _argument(name, value) for name, value in arguments.items()}).encode()


def config_text(config: object) -> str:
    """An adapter's config as servers take it: a JSON string that says what it is.

    Args:
        config: A ``peft.LoraConfig``, its fields as a mapping (``{"r": 8, "lora_alpha": 32}``), or such a string.

    Raises:
        InvalidInput: It is none of these.
    """
    if isinstance(config, str):
        return config
    if isinstance(config, Mapping):
        return _marked("LoraConfig", {str(name): _value("config", value) for name, value in config.items()})
    text = _argument("config", config)
    if not isinstance(text, str):
        raise InvalidInput("config", f"is a {type(config).__name__}; send a peft.LoraConfig or a mapping of its fields")
    return text


def component_name(field: str, component: object) -> str:
    """The name by which a server has a class: of the class itself, if it is the library's or torch's, or as it is said.

    Raises:
        InvalidInput: It is a class of this process, or an object.
    """
    if isinstance(component, str):
        return component
    if isinstance(component, type) and component.__module__.partition(".")[0] in _KNOWN_LIBRARIES:
        return component.__name__
    if isinstance(component, type) or callable(component):
        raise InvalidInput(field, _refusal(component))
    raise InvalidInput(field, f"is a {type(component).__name__}; send the name of one of the server's classes")


def component_parts(field: str, component: object) -> tuple[str, dict[str, Any] | None]:
    """The name by which a server has a class, and of an object of the library's what it was made with, else ``None``.

    Raises:
        InvalidInput: It is a class or an object of this process, or one that does not tell what it was made with.
    """
    kind = type(component)
    if isinstance(component, str | type) or kind.__module__.partition(".")[0] != "twinkle":
        return component_name(field, component), None
    names = [name for name in inspect.signature(kind).parameters if name not in {"args", "kwargs"}]
    missing = [name for name in names if not hasattr(component, name)]
    if missing:
        raise InvalidInput(field, f"{kind.__name__} does not tell its {missing[0]!r}; send its name, and init_args")
    return kind.__name__, {name: _value(f"{field}.{name}", getattr(component, name)) for name in names}


def _argument(name: str, value: Any) -> Any:
    """One argument: of these alone some are sent as strings that say what they are."""
    if isinstance(value, Mapping | str | list | tuple):
        return _value(name, value)
    pid = getattr(value, "processor_id", None)
    if isinstance(pid, str):
        return pid
    if _is_of(value, "twinkle.dataset.meta", "DatasetMeta"):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _marked("DatasetMeta", {**_value(name, {**fields, "data_slice": None}), **_slice(fields["data_slice"])})
    if _is_of(value, "peft", "PeftConfig"):
        return _marked("LoraConfig", _value(name, value.to_dict()))
    if isinstance(value, range):
        return _slice(value)["data_slice"]
    return _value(name, value)


def _marked(kind: str, fields: Mapping[str, Any]) -> str:
    return json.dumps({**fields, TYPE_KEY: kind})


def _slice(rows: Any) -> dict[str, Any]:
    if rows is None:
        return {"data_slice": None}
    if isinstance(rows, range):
        described = {SLICE_KEY: "range", "start": rows.start, "stop": rows.stop, "step": rows.step}
    else:
        described = {SLICE_KEY: "list", "values": [int(row) for row in rows]}
    return {"data_slice": described}


def _value(place: str, value: Any) -> Any:
    """A value at any depth; ``place`` is where it stands, for complaints."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(name): _value(f"{place}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return _row(place, value)
    if isinstance(value, Set | range):
        return _row(place, sorted(value) if isinstance(value, set | frozenset) else list(value))
    if isinstance(value, np.ndarray | np.generic):
        return _row(place, value.tolist()) if isinstance(value, np.ndarray) and value.ndim else value.tolist()
    if _is_of(value, "torch", "Tensor"):
        return value.detach().cpu().tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _value(f"{place}.{field.name}", getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Enum):
        return _value(place, value.value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str | int | float):
        return value
    raise InvalidInput(place, _refusal(value))


def _row(place: str, values: Sequence[Any]) -> Any:
    if all(type(value) in _PLAIN for value in values):
        return values
    return [_value(f"{place}[{number}]", value) for number, value in enumerate(values)]


def _refusal(value: Any) -> str:
    if isinstance(value, type) or callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        return f"is {name}, code of this process, which no server runs; send the name of one of the server's classes"
    return f"is a {type(value).__name__}, which JSON cannot carry; send numbers, text, lists or mappings"


def _is_of(value: Any, module: str, name: str) -> bool:
    """Whether it is an instance of a class of a library that may not be loaded, let alone installed."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
