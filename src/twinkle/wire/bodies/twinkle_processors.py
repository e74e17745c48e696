"""Bodies of the Twinkle dialect's processors. What they are made with and called with stands beside these fields."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from twinkle.wire.bodies.base import RequestBody, ResponseBody


class CreateProcessorRequest(RequestBody):
    """A data set, a loader or another processor; the arguments of its class stand beside these fields."""

    model_config = ConfigDict(extra="allow")

    processor_type: str = Field(max_length=100)
    class_type: str = Field(max_length=100)


class CreateProcessorResponse(ResponseBody):
    """Its id, by which it is called and named in others' arguments."""

    processor_id: str


class CallProcessorRequest(RequestBody):
    """A method of a processor; its arguments stand beside these fields."""

    model_config = ConfigDict(extra="allow")

    processor_id: str = Field(max_length=100)
    function: str = Field(max_length=100)


class CallProcessorResponse(ResponseBody):
    """What the method answered. Of a loader's ``__next__``, how many rows it has handed out as well."""

    result: object = None
    consumed_train_samples: int | None = None
