"""What a row of a tenant's data says, brought to the conversations, texts and tokens that are encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.conversation import user_data_get
from twinkle.data_format.row_error import RowError
from twinkle.jobs.data import DataFormat, DataUse

Fields = Mapping[str, Any]
_IGNORED = -100
_FORMS = (
    "messages; prompt and completion; chosen and rejected; input, preferred_output and non_preferred_output; text;"
    " input_ids"
)
_OF_USE = {
    DataUse.SUPERVISED: (DataFormat.CHAT, DataFormat.COMPLETION, DataFormat.TEXT, DataFormat.TOKENS),
    DataUse.PREFERENCE: (DataFormat.PREFERENCE,),
    DataUse.PROMPTS: (DataFormat.CHAT, DataFormat.COMPLETION),
}


@dataclass(frozen=True)
class Conversation:
    """Messages of which those of ``trained`` train, all of the assistant's if it is None."""

    messages: list[Any]
    tools: Any = None
    trained: list[int] | None = None

    def trajectory(self) -> dict[str, Any]:
        """The same for a template."""
        made: dict[str, Any] = {"messages": self.messages}
        if self.tools is not None:
            made["tools"] = self.tools
        if self.trained is not None:
            made["user_data"] = [("key_rounds", self.trained)]
        return made


@dataclass(frozen=True)
class PlainText:
    """Text that goes to the tokenizer as it is; what comes after ``prompt`` trains."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """Tokens with the weight of each."""

    ids: list[int]
    weights: list[float]


Sample = Conversation | PlainText | Tokens


def format_of(fields: Fields, use: DataUse) -> DataFormat:
    """What the first row says that all are.

    Raises:
        InvalidInput: It is nothing that is known, or not for this use.
    """
    found = _guess(fields, use)
    if found is None:
        columns = ", ".join(map(str, fields)) or "none"
        raise InvalidInput("format", f"cannot be told from the first row's columns ({columns}); known are: {_FORMS}")
    check_use(found, use)
    return found


def check_use(found: DataFormat, use: DataUse) -> None:
    """Refuse rows that cannot be used so.

    Raises:
        InvalidInput: It says what can.
    """
    if found not in _OF_USE[use]:
        known = " or ".join(each.value for each in _OF_USE[use])
        raise InvalidInput("format", f"is {found.value}; {use.value} data is {known}")


def samples_of(fields: Fields, form: DataFormat, use: DataUse) -> tuple[Sample, ...]:
    """What is encoded of a row: one sample, or the chosen and the rejected one.

    Raises:
        RowError: Names the column and the reason.
    """
    if form is DataFormat.CHAT:
        return (_chat(fields, use),)
    if form is DataFormat.COMPLETION:
        return (_completion(fields, use),)
    if form is DataFormat.PREFERENCE:
        return _preference(fields)
    if form is DataFormat.TEXT:
        return (PlainText("", _text(fields, "text")),)
    return (_tokens(fields),)


def _guess(fields: Fields, use: DataUse) -> DataFormat | None:
    def has(*columns: str) -> bool:
        return all(fields.get(column) is not None for column in columns)

    if has("preferred_output", "non_preferred_output") or has("chosen", "rejected") or has("positive", "negative"):
        return DataFormat.PREFERENCE
    if has("messages"):
        return DataFormat.CHAT
    if has("prompt", "completion") or (use is DataUse.PROMPTS and has("prompt")):
        return DataFormat.COMPLETION
    if has("input_ids") or has("tokens"):
        return DataFormat.TOKENS
    return DataFormat.TEXT if has("text") else None


def _chat(fields: Fields, use: DataUse) -> Conversation:
    messages = _messages(fields, "messages")
    tools = _parsed(fields.get("tools"), "tools")
    if use is DataUse.PROMPTS:
        return Conversation(messages, tools)
    return Conversation(messages, tools, _trained(messages, user_data_get(fields.get("user_data"), "key_rounds")))


def _trained(messages: Sequence[Any], rounds: list[int] | None) -> list[int] | None:
    """Those that weights leave, if any has one: OpenAI knows 0 and 1."""
    weighed = False
    trained = []
    for number, message in enumerate(messages):
        weight = message.get("weight") if isinstance(message, Mapping) else None
        if weight is not None:
            if weight not in (0, 1) or isinstance(weight, bool):
                raise RowError(f"messages[{number}].weight", f"is {weight!r}; send 0 or 1", message_number=number)
            weighed = True
        if isinstance(message, Mapping) and message.get("role") == "assistant" and weight != 0:
            trained.append(number)
    if not weighed:
        return rounds
    if not trained:
        raise RowError("messages", "have weight 0 throughout, so nothing of them trains")
    return trained


def _completion(fields: Fields, use: DataUse) -> Sample:
    prompt = _parsed_messages(fields.get("prompt"))
    if use is DataUse.PROMPTS:
        if isinstance(prompt, list):
            return Conversation(_messages({"prompt": prompt}, "prompt"), _parsed(fields.get("tools"), "tools"))
        text = _text(fields, "prompt")
        return PlainText(text, text)
    completion = _parsed_messages(fields.get("completion"))
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("completion", "and prompt must both be text, or both lists of messages")
    if isinstance(prompt, list):
        return _continued(prompt, completion, _parsed(fields.get("tools"), "tools"), "completion")
    before = _text(fields, "prompt")
    return PlainText(before, before + _text(fields, "completion"))


def _continued(prompt: list[Any], answer: Any, tools: Any, column: str) -> Conversation:
    """A conversation of which only the answer trains."""
    if isinstance(answer, Mapping):
        answer = [answer]
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not answer:
        raise RowError(column, "must be a list of messages, one at least")
    messages = _messages({column: [*prompt, *answer]}, column)
    said = range(len(prompt), len(messages))
    trained = [n for n in said if isinstance(messages[n], Mapping) and messages[n].get("role") == "assistant"]
    if not trained:
        raise RowError(column, "has no message of the assistant's, so nothing of it trains")
    return Conversation(messages, tools, trained)


def _preference(fields: Fields) -> tuple[Sample, ...]:
    if fields.get("preferred_output") is not None or fields.get("input") is not None:
        return _openai_preference(fields)
    if fields.get("positive") is not None:
        # What a preprocessor of the workbench makes.
        pair = [_chat({**fields["positive"]}, DataUse.SUPERVISED), _chat({**fields["negative"]}, DataUse.SUPERVISED)]
        return tuple(pair)
    tools = _parsed(fields.get("tools"), "tools")
    prompt = _parsed_messages(fields.get("prompt"))
    answers = {name: _parsed_messages(fields.get(name)) for name in ("chosen", "rejected")}
    for name, answer in answers.items():
        if answer is None:
            raise RowError(name, "is missing; a row of preferences has chosen and rejected")
    if prompt is None and all(isinstance(answer, list) for answer in answers.values()):
        return _whole_conversations(answers["chosen"], answers["rejected"], tools)
    if isinstance(prompt, list):
        return tuple(_continued(prompt, answer, tools, name) for name, answer in answers.items())
    if not all(isinstance(answer, str) for answer in answers.values()):
        if isinstance(prompt, str):
            question = [{"role": "user", "content": prompt}]
            return tuple(_continued(question, answer, tools, name) for name, answer in answers.items())
        raise RowError("chosen", "and rejected must both be text, or both lists of messages")
    before = "" if prompt is None else _text(fields, "prompt")
    return tuple(PlainText(before, before + _text(answers, name)) for name in answers)


def _openai_preference(fields: Fields) -> tuple[Sample, ...]:
    given = _parsed(fields.get("input"), "input")
    if not isinstance(given, Mapping):
        raise RowError("input", "is missing; send {'messages': [...]}")
    prompt = _messages(given, "messages", within="input.")
    tools = given.get("tools")
    pair = []
    for name in ("preferred_output", "non_preferred_output"):
        if fields.get(name) is None:
            raise RowError(name, "is missing; send a list with the assistant's message")
        pair.append(_continued(prompt, _parsed(fields[name], name), tools, name))
    return tuple(pair)


def _whole_conversations(chosen: list[Any], rejected: list[Any], tools: Any) -> tuple[Sample, ...]:
    """Two conversations with a common beginning: what follows it trains."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if same == len(chosen) or same == len(rejected):
        raise RowError("rejected", "says nothing that chosen does not say too")
    return (
        _continued(chosen[:same], chosen[same:], tools, "chosen"),
        _continued(rejected[:same], rejected[same:], tools, "rejected"),
    )


def _tokens(fields: Fields) -> Tokens:
    column = "input_ids" if fields.get("input_ids") is not None else "tokens"
    ids = _parsed(fields.get(column), column)
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise RowError(column, "must be a list of token ids, one at least")
    labels, weights = _parsed(fields.get("labels"), "labels"), _parsed(fields.get("weights"), "weights")
    if labels is not None:
        if not isinstance(labels, list) or len(labels) != len(ids):
            raise RowError("labels", f"must be a list of {len(ids)}, one for each token")
        for place, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (_IGNORED, token):
                raise RowError(f"labels[{place}]", f"is {label!r}; send {_IGNORED} or the token there, {token}")
        return Tokens(ids, [0.0 if label == _IGNORED else 1.0 for label in labels])
    if weights is None:
        return Tokens(ids, [1.0] * len(ids))
    numbers = isinstance(weights, list) and all(type(weight) in (int, float) for weight in weights)
    if not numbers or len(weights) != len(ids):
        raise RowError("weights", f"must be a list of {len(ids)} numbers, one for each token")
    return Tokens(ids, [float(weight) for weight in weights])


def _messages(fields: Fields, column: str, *, within: str = "") -> list[Any]:
    """A list of messages without pictures and without what only says how they train."""
    messages = _parsed(fields.get(column), column)
    if not isinstance(messages, list) or not messages:
        found = "is missing" if messages is None else "is empty" if messages == [] else "is no list"
        raise RowError(within + column, f"{found}; send a list of messages, each with role and content")
    for name in ("images", "videos", "audios"):
        if fields.get(name):
            raise RowError(within + name, "are in the row; rows of files hold text alone")
    made = []
    for number, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(parts, list):
            for place, part in enumerate(parts):
                if isinstance(part, Mapping) and part.get("type") != "text":
                    field = f"{within}{column}[{number}].content[{place}]"
                    raise RowError(field, f"is of type {part.get('type')!r}; rows of files hold text alone")
        if isinstance(message, Mapping) and message.get("images"):
            raise RowError(f"{within}{column}[{number}].images", "are in the row; rows of files hold text alone")
        made.append(message)
    return made


def _text(fields: Fields, column: str) -> str:
    value = fields.get(column)
    if not isinstance(value, str):
        raise RowError(column, "is missing; send text" if value is None else f"is {type(value).__name__}; send text")
    if not value:
        raise RowError(column, "is empty; send text")
    return value


def _parsed_messages(value: Any) -> Any:
    """Messages that a column of text holds as JSON, or what it is."""
    if isinstance(value, str) and value.startswith(('[{"', "[{'")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _parsed(value: Any, column: str) -> Any:
    """A list or an object, which a column of text holds as JSON."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(column, f"is no JSON: {error}") from error
