"""From a row or a conversation to a prompt, as ``twinkle.template`` makes it in a script, mostly by the same code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

import numpy as np
import orjson

from twinkle.core.errors import InvalidInput
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.pictures import PictureLimits
from twinkle.data_format.continuation import Texts, continued_row
from twinkle.data_format.deepseek import DeepseekWriter
from twinkle.data_format.media import with_pictures
from twinkle.data_format.messages import read_messages, read_tools, with_reasoning, with_system
from twinkle.data_format.row_error import RowError
from twinkle.server.admission.offers import picture_rules
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.drawing import PlacedPicture
from twinkle.server.openai.pictures import place_pictures, read_pictures
from twinkle.wire.patches import GRIDS, PATCH_INPUTS, PATCHES, have_patches, place_patches, read_grids, write_patches
from twinkle.wire.sampling import IMAGE_PATCHES, PromptChunk

Truncation = Literal["raise", "left", "right", "delete"]
OWN_WORDING = "DeepseekV4Template"
"""Whose conversations are written by its own protocol, where others take the served model's chat template."""
TEMPLATES = ("Template", "Qwen3_5Template", "Qwen2_5VLTemplate", "Gemma4Template", OWN_WORDING)
_MAX_TOKEN = 2**31 - 1
_PATCH_KINDS = {PATCHES: np.float32}
# Of what a client may send in the place of lists and texts.
_UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_WITHOUT_EFFECT = ("revision", "token", "trust_remote_code")


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """How conversations become prompts. The tokenizer is always that of the served model, and so is the chat template
    unless conversations are in DeepSeek-V4's protocol, which has none.
    """

    max_length: int | None = 8192
    truncation_strategy: Truncation = "raise"
    default_system: str | None = None
    enable_thinking: bool = True
    use_chat_template: bool = True
    is_deepseek_v4: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    """What else the chat template is told."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PromptTemplate:
        """The template of some settings, as a client sends them or as they were stored.

        Raises:
            InvalidInput: One of them cannot be.
        """
        own = {one.name for one in fields(cls)} - {"variables"}
        given = {name: value for name, value in settings.items() if name in own}
        others = {name: value for name, value in settings.items() if name not in own | set(_WITHOUT_EFFECT)}
        made = cls(**given, variables=others)
        made._check()
        return made

    def settings(self) -> dict[str, Any]:
        """What :meth:`of` makes the same of."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "variables"}
        return {**self.variables, **own}

    def _check(self) -> None:
        length = self.max_length
        if length is not None and (type(length) is not int or length < 1):
            raise InvalidInput("max_length", f"is {length!r}; send a whole number from 1 on, or null")
        if self.truncation_strategy not in get_args(Truncation):
            raise InvalidInput(
                "truncation_strategy",
                f"is {self.truncation_strategy!r}; for a prompt it can be {', '.join(get_args(Truncation))}",
            )
        if self.default_system is not None and not isinstance(self.default_system, str):
            raise InvalidInput("default_system", "must be a text")
        for name in ("enable_thinking", "use_chat_template", "is_deepseek_v4"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(name, "must be true or false")
        if self.is_deepseek_v4:
            self.writer()

    def writer(self) -> DeepseekWriter:
        """What writes conversations where the model's chat template does not.

        Raises:
            InvalidInput: It is told something that its protocol has not.
        """
        unknown = sorted(self.variables.keys() - {"reasoning_effort"})
        if unknown:
            raise InvalidInput(unknown[0], f"is no setting of {OWN_WORDING}, which takes reasoning_effort")
        return DeepseekWriter(is_thinking=self.enable_thinking, **self.variables)


@dataclass(frozen=True, kw_only=True)
class RowPrompt:
    """A prompt, and the row that it came in, with its tokens."""

    row: dict[str, Any]
    tokens: list[int]
    pictures: tuple[PlacedPicture, ...] = ()


def read_row(
    row: Mapping[str, Any] | list[int],
    template: PromptTemplate,
    text_model: TextModel | None,
    capabilities: MeshCapabilities,
    limits: PictureLimits,
) -> RowPrompt:
    """The prompt of one input. Blocks for as long as encoding takes.

    Raises:
        InvalidInput: It is neither a row of tokens nor a conversation, or one that cannot be a prompt.
    """
    given = {"input_ids": row} if isinstance(row, list) else dict(row)
    _refuse_unwritable(given)
    if given.get("input_ids") is not None:
        return _read_tokens(given, capabilities, limits)
    if given.get("messages") is None and "text" not in given:
        raise InvalidInput("input_ids", "is missing; send a row with input_ids, or a conversation with messages")
    if text_model is None:
        raise InvalidInput("messages", "the server has no tokenizer of this model; send rows with input_ids")
    pictures: list[PlacedPicture] = []
    try:
        if template.use_chat_template:
            tokens, pictures = _encode(given, template, text_model, capabilities, limits)
        else:
            tokens = text_model.encode(_plain_text(given), context=capabilities.max_context_length, field="messages")
    except _UNREADABLE as error:
        raise InvalidInput("messages", f"cannot be read as a conversation: {error}") from error
    tokens = _shortened(tokens, template, has_pictures=bool(pictures))
    return RowPrompt(row={**given, "input_ids": tokens}, tokens=tokens, pictures=tuple(pictures))


def _read_tokens(row: dict[str, Any], capabilities: MeshCapabilities, limits: PictureLimits) -> RowPrompt:
    tokens = row["input_ids"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InvalidInput("input_ids", "must be a list of token ids")
    if not all(0 <= token <= min(_MAX_TOKEN, capabilities.vocab_size - 1) for token in tokens):
        raise InvalidInput("input_ids", f"must be token ids from 0 to {capabilities.vocab_size - 1}")
    _refuse_packed(row)
    try:
        continued_row(row, [], texts=Texts())
    except _UNREADABLE as error:
        raise InvalidInput("position_ids", f"or another list does not belong to these tokens: {error}") from error
    return RowPrompt(row=row, tokens=tokens, pictures=_patches(row, tokens, capabilities, limits))


def _refuse_packed(row: Mapping[str, Any]) -> None:
    members = row.get("member_lengths")
    if isinstance(members, list) and len(members) > 1:
        raise InvalidInput(
            "member_lengths", f"are of {len(members)} sequences; a prompt is one, so send each by itself"
        )
    positions = row.get("position_ids")
    if isinstance(positions, list) and 0 in positions[1:]:
        raise InvalidInput("position_ids", "begin again, so the row holds several sequences; send each by itself")


def _patches(
    row: Mapping[str, Any], tokens: list[int], capabilities: MeshCapabilities, limits: PictureLimits
) -> tuple[PlacedPicture, ...]:
    """The pictures of a row that a template has encoded already."""
    given = {name: row[name] for name in PATCH_INPUTS if row.get(name) is not None}
    if not have_patches(given):
        return ()
    try:
        inputs = {name: np.asarray(value, dtype=_PATCH_KINDS.get(name, np.int64)) for name, value in given.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(PATCHES, f"or {GRIDS} is no array of numbers: {error}") from error
    rules = picture_rules(capabilities, PATCHES)
    read_grids(inputs.get(GRIDS), prefix="", rules=rules, limits=limits)
    placed = place_patches(np.asarray(tokens), inputs, prefix="", tokens_field="input_ids", rules=rules)
    return tuple(
        PlacedPicture(
            one.start,
            PromptChunk(
                type=IMAGE_PATCHES, data=write_patches(one), grid_thw=one.grid_thw, expected_tokens=one.num_tokens
            ),
        )
        for one in placed
    )


def _refuse_unwritable(row: Mapping[str, Any]) -> None:
    """What comes in a row goes back with its answer."""
    try:
        orjson.dumps(row)
    except TypeError as error:
        raise InvalidInput("row", f"holds a value that cannot be written back: {error}") from error


def _encode(
    row: Mapping[str, Any],
    template: PromptTemplate,
    text_model: TextModel,
    capabilities: MeshCapabilities,
    limits: PictureLimits,
) -> tuple[list[int], list[PlacedPicture]]:
    messages, sources = with_pictures(read_messages(row), row)
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] == "" and not last.get("tool_calls"):
        messages = messages[:-1]
    if not messages:
        raise RowError("messages", "hold no question")
    messages = with_system(messages, template.default_system)
    context = capabilities.max_context_length
    if template.is_deepseek_v4:
        turns = with_reasoning(messages, is_read=True)
        text = template.writer().render(turns, read_tools(row), add_generation_prompt=True)
        return text_model.encode_written(text, context=context), []
    turns = with_reasoning(messages, is_read=text_model.reads_reasoning)
    options = {**template.variables, "enable_thinking": template.enable_thinking}
    tools = read_tools(row)
    if tools is not None:
        options["tools"] = tools
    chunks = []
    if sources:
        urls = [(f"images[{i}]", _url(i, source)) for i, source in enumerate(sources)]
        chunks = read_pictures(urls, picture_rules(capabilities, "messages"), limits)
    tokens = text_model.encode_chat([_plain_turn(turn) for turn in turns], options, context=context)
    return place_pictures(tokens, chunks, capabilities)


def _plain_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of text alone with its parts as one text, which is what templates take."""
    content = turn["content"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    return {**turn, "content": content}


def _plain_text(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("text"), str):
        return cast(str, row["text"])
    messages = read_messages(row)
    if len(messages) != 1 or not isinstance(messages[0]["content"], str):
        raise RowError("messages", "without a chat template must be one message of text")
    return messages[0]["content"]


def _url(number: int, source: object) -> str:
    if not isinstance(source, str):
        raise RowError(f"images[{number}]", "must be a data: URL that holds the picture")
    return source


def _shortened(tokens: list[int], template: PromptTemplate, *, has_pictures: bool) -> list[int]:
    if template.max_length is None or len(tokens) <= template.max_length:
        return tokens
    if template.truncation_strategy in ("raise", "delete") or has_pictures:
        raise RowError(
            "messages",
            f"are {len(tokens)} tokens, max_length is {template.max_length}; shorten them or set a longer one",
        )
    if template.truncation_strategy == "left":
        return tokens[-template.max_length :]
    return tokens[: template.max_length]
