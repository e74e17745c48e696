"""What a check of data is asked for: kind ``check``. Its result is the report; data that is wrong fail it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinkle.wire.bodies.base import MAX_INT32, Identifier, Text
from twinkle.wire.bodies.jobs_base import JobSpec

Count = Annotated[int, Field(ge=1, le=MAX_INT32)]


class CheckSpec(JobSpec):
    """Rows that are looked at as if a fine-tuning were to follow, without any device."""

    model: Identifier = Field(description="a base model that is served: whose tokenizer and chat template count")
    data: Identifier = Field(description="the id of a file, or a data set of a hub: hf://org/name, ms://org/name")
    use: Literal["supervised", "preference", "prompts"] = Field(
        default="supervised", description="what the rows are for, which says what a row must hold"
    )
    subset: Text = Field(default="default", description="of a hub's data set")
    split: Text = Field(default="train", description="of a hub's data set")
    preprocessor: Text | None = Field(default=None, description="makes conversations of a data set's columns, by name")
    format: Literal["auto", "chat", "completion", "preference", "text", "tokens"] = "auto"
    template: Text = Field(default="Template", description="the class that makes tokens of chats")
    system: Text | None = Field(default=None, description="the system message of conversations that have none")
    enable_thinking: bool = True
    max_length: Annotated[int, Field(ge=2, le=MAX_INT32)] | None = Field(
        default=None, description="tokens of a row at most; default: what the model takes"
    )
    truncation: Literal["raise", "left", "right", "split", "delete"] = "raise"
    max_rows: Count | None = Field(default=None, description="only the first rows")
