"""Bodies: those of requests made of a caller's values and written, those of answers read."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from twinkle.client.errors import BadAnswer
from twinkle.wire.bodies.base import RequestBody, ResponseBody, invalid_input

BodyT = TypeVar("BodyT", bound=RequestBody)
AnswerT = TypeVar("AnswerT", bound=ResponseBody)


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


def read_answer(answer_class: type[AnswerT], raw: bytes) -> AnswerT:
    """An answer's body.

    Raises:
        BadAnswer: It is not what this server answers.
    """
    try:
        return answer_class.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadAnswer(
            f"the answer is no {answer_class.__name__} ({first['msg']}); is this a Twinkle server?"
        ) from error
