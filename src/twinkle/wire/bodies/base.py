"""What all JSON bodies share: the fields' types and limits, reading with clear errors, writing.

A request ignores what it does not know, so that newer clients keep working. Numbers are as JSON gives them: no string
passes for a number. ``NaN`` and ``Infinity`` are read as floats (Python clients write them); a field that must be
finite says so itself, and the training hyperparameters are judged by the worker, where a refusal has a future to go to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.core.names import plain_name
from twinkle.wire.paths import in_one_scheme

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_TTL_S = 10 * 366 * 24 * 3600
MAX_METADATA_ENTRIES = 256
MAX_METADATA_CHARS = 64 * 1024
# Numbers, texts, lists and objects of one body together: two bytes on the wire may be a hundred in memory.
MAX_VALUES = 1 << 21
MAX_KEYS = 1 << 18
"""Of all its objects together: a key costs more than a value, and is read with the interpreter's lock held."""
_ALWAYS_FEW_VALUES_BYTES = 1 << 20

_MAX_SHOWN_CHARS = 60
_LARGEST_SHOWN = 10**30
# Complaints of pydantic's that leave out what was sent.
_OF_A_VALUE = frozenset(
    {"greater_than_equal", "less_than_equal", "greater_than", "less_than", "finite_number", "literal_error", "enum"}
)
_OF_A_TEXT_S_LENGTH = frozenset({"string_too_long", "string_too_short"})
_JSON_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}

# The SDK writes a NaN or an infinity as null.
NanFromNull = Annotated[
    float, BeforeValidator(lambda value: math.nan if value is None else value, json_schema_input_type=float | None)
]

RequestT = TypeVar("RequestT", bound="RequestBody")


def _storable(text: str) -> str:
    # PostgreSQL cannot store NUL in a text column.
    if "\x00" in text:
        raise ValueError("must not contain NUL characters")
    return text


def _metadata(value: object) -> object:
    """Turns values into text: clients may send any JSON, but the SDK reads metadata back as text only."""
    if not isinstance(value, Mapping):
        return value
    texts = {
        str(key): item if isinstance(item, str) else json.dumps(item, separators=(",", ":"))
        for key, item in value.items()
    }
    num_chars = sum(len(key) + len(text) for key, text in texts.items())
    if len(texts) > MAX_METADATA_ENTRIES or num_chars > MAX_METADATA_CHARS:
        raise ValueError(
            f"must have at most {MAX_METADATA_ENTRIES} entries and {MAX_METADATA_CHARS} characters,"
            f" not {len(texts)} and {num_chars}"
        )
    return texts


Text = Annotated[str, Field(max_length=4096), AfterValidator(_storable)]
Name = Annotated[Text, AfterValidator(plain_name)]
"""What a client calls something that it makes."""
PathText = Annotated[Text, AfterValidator(in_one_scheme)]
Identifier = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_storable)]
SeqId = Annotated[int, Field(ge=0, le=MAX_INT64)]
OperationSeqId = Annotated[int, Field(ge=1, le=MAX_INT32)]
TtlSeconds = Annotated[int, Field(ge=1, le=MAX_TTL_S)]
Metadata = Annotated[
    dict[Text, Annotated[str, AfterValidator(_storable)]],
    BeforeValidator(
        _metadata, json_schema_input_type=Annotated[dict[str, object], Field(max_length=MAX_METADATA_ENTRIES)]
    ),
]


class RequestBody(BaseModel):
    """Base of what clients send."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())


class ResponseBody(BaseModel):
    """Base of what the server answers."""

    # A float that is not finite goes out as the text "NaN": the SDK's JSON reader refuses the bare word.
    model_config = ConfigDict(frozen=True, protected_namespaces=(), ser_json_inf_nan="strings")

    def to_json(self) -> bytes:
        """Writes the body without its nulls, which the SDK reads the same as absent."""
        return self.model_dump_json(exclude_none=True).encode()


def parse_body(body_class: type[RequestT], raw: bytes) -> RequestT:
    """Reads a JSON body.

    Raises:
        InvalidInput: It names the first field at fault.
        TooLarge: It has very many values or keys.
    """
    _refuse_too_many_values(raw)
    try:
        return body_class.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_input(error) from error


def parse_object(body_class: type[RequestT], values: Mapping[str, Any], *, within: str) -> RequestT:
    """Reads an object that was part of a body.

    Raises:
        InvalidInput: It names the first field at fault, behind what it is part of.
    """
    try:
        return body_class.model_validate(values)
    except ValidationError as error:
        inner = invalid_input(error)
        raise InvalidInput(f"{within}.{inner.field}", inner.message.partition(": ")[2]) from error


def _refuse_too_many_values(raw: bytes) -> None:
    if len(raw) <= _ALWAYS_FEW_VALUES_BYTES:
        return
    # One more than there are commas at most, and each list or object is one itself. Those within texts count too.
    num_values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if num_values > MAX_VALUES:
        raise TooLarge(f"the request body holds {num_values} values, more than {MAX_VALUES}; send less at once")
    num_keys = raw.count(b":")
    if num_keys > MAX_KEYS:
        raise TooLarge(f"the request body holds {num_keys} keys, more than {MAX_KEYS}; send less at once")


def invalid_input(error: ValidationError) -> InvalidInput:
    """Turns pydantic's first complaint into ours."""
    first = error.errors(include_url=False, include_context=False)[0]
    return InvalidInput(path_of(first["loc"]) or "body", complaint(first))


def complaint(error: ErrorDetails) -> str:
    """One complaint of pydantic's in our words: the limit, and what was sent where that is short and no secret."""
    kind, given = error["type"], error["input"]
    if kind == "missing":
        return "is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    for theirs in ("Input should ", "String should ", "List should ", "Tuple should ", "Dictionary should "):
        message = message.replace(theirs, "must ", 1) if message.startswith(theirs) else message
    if kind in _OF_A_TEXT_S_LENGTH:
        return f"{message}, not {len(given)}"
    if kind in _OF_A_VALUE:
        return f"{message}, not {_shown(given)}"
    if kind.endswith("_type") and type(given) in _JSON_KINDS:
        return f"{message}, not {_JSON_KINDS[type(given)]}"
    return message


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > _LARGEST_SHOWN:
        return "a number with more than 30 digits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def path_of(location: tuple[int | str, ...]) -> str:
    """A place in a body as we write it, like ``data[3].weight``."""
    path = ""
    for part in location:
        if isinstance(part, str) and not part.isidentifier():
            continue  # pydantic's name for one side of a union, like list[int]
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def is_storable(text: str) -> bool:
    """Whether a database takes it: no NUL, which PostgreSQL refuses, and no half of a surrogate pair.

    A pydantic body never has the latter, but :func:`read_keys` may.
    """
    return "\x00" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def read_keys(raw: bytes) -> dict[str, Any]:
    """Reads the top level of a JSON object, or gives an empty one; for what must work on a bad body."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
