"""What clients send to the OpenAI-compatible routes. A field that would change the answer and cannot is refused."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from twinkle.wire.bodies.base import MAX_INT32, MAX_INT64, Identifier, RequestBody, Text

MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_COMPLETION_LOGPROBS = 5
MAX_CHAT_LOGPROBS = 20


def _must_be_off(value: object) -> object:
    if value and value != {"type": "text"}:
        raise ValueError("is not supported here; leave it out")
    return value


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"must be a text, or a list of at most {MAX_STOPS} texts, none of them empty")
    return stops


def _prompts(value: object) -> object:
    """Brings the four forms to one: a list of prompts, each a text or token ids."""
    prompts = value if isinstance(value, list) else [value]
    if prompts and all(type(token) is int for token in prompts):
        prompts = [prompts]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must be one to {MAX_PROMPTS} prompts, not {len(prompts)}")
    if not all(isinstance(p, str) or (isinstance(p, list) and all(type(t) is int for t in p)) for p in prompts):
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    return prompts


Off = Annotated[
    object,
    AfterValidator(_must_be_off),
    WithJsonSchema({"enum": [None, False, 0, "", [], {}, {"type": "text"}], "description": "Not supported here."}),
]
_StopText: TypeAlias = Annotated[str, Field(min_length=1)]
_StopForms: TypeAlias = _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS)]
_SomePrompts = Field(min_length=1, max_length=MAX_PROMPTS)
_PromptForms: TypeAlias = (
    str
    | Annotated[list[str], _SomePrompts]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[list[int]], _SomePrompts]
)


class StreamOptions(RequestBody):
    """``stream_options``."""

    include_usage: bool | None = None


class DrawRequest(RequestBody):
    """What both kinds of completion share."""

    model: Identifier
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[str] | None, BeforeValidator(_stops, json_schema_input_type=_StopForms | None)] = None
    seed: int | None = Field(default=None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    frequency_penalty: Off = None
    presence_penalty: Off = None
    logit_bias: Off = None

    @property
    def streams_usage(self) -> bool:
        """Whether the stream ends with the counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(DrawRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[
        list[str | list[int]], Field(fail_fast=True), BeforeValidator(_prompts, json_schema_input_type=_PromptForms)
    ]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    best_of: Literal[1] | None = None
    echo: Off = None
    suffix: Off = None


class TextPart(RequestBody):
    """A text within a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestBody):
    """Where a picture is: in the URL itself."""

    url: str = Field(repr=False)


class ImagePart(RequestBody):
    """A picture within a message's content; the whole of it, in a ``data:`` URL."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(RequestBody):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Off = None

    def for_template(self) -> dict[str, object]:
        """The turn as chat templates expect it: its content as one text, or with pictures as a list of parts."""
        parts: list[TextPart | ImagePart] = []
        if isinstance(self.content, list):
            parts += self.content
        else:
            parts.append(TextPart(type="text", text=self.content or ""))
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        content: object = "".join(texts)
        if len(texts) < len(parts):
            content = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in parts
            ]
        turn: dict[str, object] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.reasoning_content is not None:
            turn["reasoning_content"] = self.reasoning_content
        return turn


class ChatRequest(DrawRequest):
    """``POST /v1/chat/completions``. ``chat_template_kwargs`` goes to the model's template as it is.

    Twinkle's clients name a checkpoint of the base model ``model`` in ``adapter_uri``.
    """

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    adapter_uri: Text | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_CHAT_LOGPROBS)
    chat_template_kwargs: dict[str, object] | None = None
    tools: Off = None
    functions: Off = None
    response_format: Off = None
    audio: Off = None

    def picture_urls(self) -> list[tuple[str, str]]:
        """The URLs of all pictures in their order, each with its place."""
        return [
            (f"messages[{i}].content[{j}].image_url.url", part.image_url.url)
            for i, message in enumerate(self.messages)
            for j, part in enumerate(message.content if isinstance(message.content, list) else ())
            if isinstance(part, ImagePart)
        ]

    @model_validator(mode="after")
    def _scores_go_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self
