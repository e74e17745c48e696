"""The calls of tools in what a model wrote: each family has its own way to write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.data_format.conversation import ToolCall


@dataclass(frozen=True)
class WrittenCalls:
    """Calls, and which characters they are written with."""

    start: int
    end: int
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    """Names and arguments."""


_GEMMA_CALL = re.compile(r"<\|tool_call>\s*call:\s*([^\s{]+)\s*\{")
_GEMMA_END = "<tool_call|>"
_GEMMA_PIECE = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<name>[^\s{}\[\],:<"]+)\s*:|(?P<sign>[{}\[\],])|-?\d[\d.eE+-]*|true|false|null|\s+',
    re.DOTALL,
)

Parser = Callable[[str], Iterator[WrittenCalls]]

_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)
_QWEN_BLOCK = re.compile(r"(?:<tool_call>\s*)?<function=([^>\s]+)>(.*?)</function>(?:\s*</tool_call>)?", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_DSML_BLOCK = re.compile(r"<｜DSML｜(tool_calls|function_calls)>(.*?)</｜DSML｜\1>", re.DOTALL)
_DSML_CALL = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)
_VCP_BLOCK = re.compile(r"<<<\[TOOL_REQUEST\]>>>(.*?)<<<\[END_TOOL_REQUEST\]>>>", re.DOTALL)
_VCP_FIELD = re.compile(r"(\w+)\s*[:：]\s*「始」(.*?)「末」", re.DOTALL)
# Tools of this kind have names of several words; no element of HTML has.
_CLINE_BLOCK = re.compile(
    r"^[ \t]*<([a-z]+(?:_[a-z0-9]+)+)>\s*((?:<(\w+)>.*?</\3>\s*)+)</\1>", re.DOTALL | re.MULTILINE
)
_CLINE_PARAMETER = re.compile(r"<(\w+)>\n?(.*?)\n?</\1>", re.DOTALL)
_REACT = re.compile(
    r"^Action[ \t]*:[ \t]*(\S[^\n]*?)[ \t]*\n+Action Input[ \t]*:[ \t]*(.*?)(?=\n+Observation|\n+Action[ \t]*:|\Z)",
    re.DOTALL | re.MULTILINE,
)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a text, arguments as JSON text; none if it holds none that can be read."""
    found = [call for written in _found(text) for call in written.calls]
    return [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for number, (name, arguments) in enumerate(found)
    ]


def without_tool_calls(text: str) -> str:
    """The text without what :func:`parse_tool_calls` finds in it."""
    kept, last = [], 0
    for written in _found(text):
        kept.append(text[last : written.start])
        last = written.end
    return "".join([*kept, text[last:]]).strip() if last else text


def _found(text: str) -> Sequence[WrittenCalls]:
    """What the first parser that finds anything finds."""
    return next((found for parser in PARSERS if (found := list(parser(text)))), [])


def _hermes(text: str) -> Iterator[WrittenCalls]:
    for block in _HERMES.finditer(text):
        call = _json(block.group(1))
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = call.get("arguments", call.get("parameters", {}))
            arguments = _json(arguments) if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict):
                yield WrittenCalls(block.start(), block.end(), ((call["name"], arguments),))


def _qwen(text: str) -> Iterator[WrittenCalls]:
    for block in _QWEN_BLOCK.finditer(text):
        arguments = {name: _value(value) for name, value in _QWEN_PARAMETER.findall(block.group(2))}
        yield WrittenCalls(block.start(), block.end(), ((block.group(1), arguments),))


def _dsml(text: str) -> Iterator[WrittenCalls]:
    for block in _DSML_BLOCK.finditer(text):
        calls = tuple(
            (
                name,
                {
                    parameter: value if is_text == "true" else _value(value)
                    for parameter, is_text, value in _DSML_PARAMETER.findall(body)
                },
            )
            for name, body in _DSML_CALL.findall(block.group(2))
        )
        yield WrittenCalls(block.start(), block.end(), calls)


def _vcp(text: str) -> Iterator[WrittenCalls]:
    for block in _VCP_BLOCK.finditer(text):
        fields = {name: value.strip() for name, value in _VCP_FIELD.findall(block.group(1))}
        name = fields.pop("tool_name", None)
        if name:
            yield WrittenCalls(block.start(), block.end(), ((name, fields),))


def _cline(text: str) -> Iterator[WrittenCalls]:
    for block in _CLINE_BLOCK.finditer(text):
        arguments = {name: _value(value) for name, value in _CLINE_PARAMETER.findall(block.group(2))}
        yield WrittenCalls(block.start(), block.end(), ((block.group(1), arguments),))


def _react(text: str) -> Iterator[WrittenCalls]:
    for block in _REACT.finditer(text):
        given = block.group(2).strip()
        arguments = _json(given)
        named = arguments if isinstance(arguments, dict) else {"input": given} if given else {}
        yield WrittenCalls(block.start(), block.end(), ((block.group(1), named),))


def _gemma(text: str) -> Iterator[WrittenCalls]:
    for call in _GEMMA_CALL.finditer(text):
        arguments, end = _gemma_value(text, call.end() - 1)
        if isinstance(arguments, dict):
            end += len(_GEMMA_END) if text.startswith(_GEMMA_END, end) else 0
            yield WrittenCalls(call.start(), end, ((call.group(1), arguments),))


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """A value as Gemma 4 writes it, texts between ``<|"|>`` and names without quotes, and where it ends.

    Brackets are counted instead of followed: what nests deep costs no stack.
    """
    written: list[str] = []
    depth, end = 0, at
    for piece in _GEMMA_PIECE.finditer(text, at):
        if piece.start() != end:
            break
        end = piece.end()
        quoted, name, sign = piece.group("text"), piece.group("name"), piece.group("sign")
        if quoted is not None or name is not None:
            written.append(json.dumps(quoted if quoted is not None else name, ensure_ascii=False))
            written.append("" if name is None else ":")
        else:
            written.append(piece.group())
        depth += 1 if sign in ("{", "[") else -1 if sign in ("}", "]") else 0
        if depth <= 0:
            break
    try:
        return _json("".join(written)), end
    except RecursionError:
        return None, end


PARSERS: tuple[Parser, ...] = (_dsml, _gemma, _qwen, _hermes, _vcp, _cline, _react)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _value(text: str) -> Any:
    """An argument that is written without quotes: what reads as JSON other than a text is that."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value
