"""The shapes of OpenAI's answers, as far as they are given here."""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

FinishReason: TypeAlias = Literal["stop", "length"]

_NOTHING_ELSE = ConfigDict(extra="forbid")


@with_config(_NOTHING_ELSE)
class ModelInfo(TypedDict):
    """A base model or a checkpoint; the time is 0 for a base model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


@with_config(_NOTHING_ELSE)
class ModelList(TypedDict):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelInfo]


@with_config(_NOTHING_ELSE)
class DeletedModel(TypedDict):
    """``DELETE /v1/models/{model}``."""

    id: str
    object: Literal["model"]
    deleted: bool


@with_config(_NOTHING_ELSE)
class PromptDetails(TypedDict):
    """Tokens that had been computed before."""

    cached_tokens: int


@with_config(_NOTHING_ELSE)
class Usage(TypedDict):
    """Tokens read and drawn."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


@with_config(_NOTHING_ELSE)
class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


@with_config(_NOTHING_ELSE)
class CompletionChoice(TypedDict):
    """One sample of a completion. The ids come when asked for, or when no tokenizer can make a text of them."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


@with_config(_NOTHING_ELSE)
class Completion(TypedDict):
    """``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@with_config(_NOTHING_ELSE)
class ScoredToken(TypedDict):
    """A token; its bytes are absent when it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


@with_config(_NOTHING_ELSE)
class DrawnToken(ScoredToken):
    """A token that was drawn, and the likeliest in its place."""

    top_logprobs: list[ScoredToken]


@with_config(_NOTHING_ELSE)
class ChatLogprobs(TypedDict):
    """One entry for each token."""

    content: list[DrawnToken]
    refusal: None


@with_config(_NOTHING_ELSE)
class AssistantMessage(TypedDict):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


@with_config(_NOTHING_ELSE)
class ChatChoice(TypedDict):
    """One sample of a turn."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]


@with_config(_NOTHING_ELSE)
class ChatCompletion(TypedDict):
    """``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
