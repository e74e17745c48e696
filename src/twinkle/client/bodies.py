"""Bodies of requests: made of a caller's values, and written."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from twinkle.wire.bodies.base import RequestBody, invalid_input

BodyT = TypeVar("BodyT", bound=RequestBody)


def make_body(body_class: type[BodyT], /, **values: object) -> BodyT:
    """A body of a caller's values.

    Raises:
        InvalidInput: One of them is outside its limits.
    """
    try:
        return body_class(**values)
    except ValidationError as error:
        raise invalid_input(error) from error


def to_json(body: RequestBody) -> bytes:
    """A body as it is sent: without what is not set."""
    return body.model_dump_json(exclude_none=True).encode()
