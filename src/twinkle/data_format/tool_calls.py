"""The calls of tools in what a model wrote: each family has its own way to write them."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
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


Parser = Callable[[str], Iterator[WrittenCalls]]

# No pattern looks from one place to the end of the text and from the next place again: what a model writes, perhaps to
# do harm, is read in time that grows with its length alone. So blocks are an opening and the first closing after it.
_NAME = r"[^<>\s]{1,256}"
_GEMMA_CALL = re.compile(r"<\|tool_call>\s*call:\s*([^\s{]{1,256})\s*\{")
_GEMMA_END = "<tool_call|>"
_GEMMA_PIECE = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<name>[^\s{}\[\],:<"]+)\s*:|(?P<sign>[{}\[\],])|-?\d[\d.eE+-]*|true|false|null|\s+',
    re.DOTALL,
)
_HERMES = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"(?<=\})\s*(?:</tool_call>|\Z)")
_QWEN_BLOCK = (
    re.compile(rf"(?:<tool_call>\s*)?<function=({_NAME})>"),
    re.compile(r"</function>(?:\s*</tool_call>)?"),
)
_QWEN_PARAMETER = re.compile(rf"<parameter=({_NAME})>\n?"), re.compile(r"\n?</parameter>")
_DSML_BLOCK = re.compile(r"<｜DSML｜(tool_calls|function_calls)>")
_DSML_CALL = re.compile(r'<｜DSML｜invoke name="([^"]{1,256})">'), re.compile("</｜DSML｜invoke>")
_DSML_PARAMETER = (
    re.compile(r'<｜DSML｜parameter name="([^"]{1,256})" string="(true|false)">'),
    re.compile("</｜DSML｜parameter>"),
)
_VCP_BLOCK = re.compile(r"<<<\[TOOL_REQUEST\]>>>"), re.compile(r"<<<\[END_TOOL_REQUEST\]>>>")
_VCP_FIELD = re.compile(r"(?<!\w)(\w{1,256})\s*[:：]\s*「始」"), re.compile("「末」")
# Tools of this kind have names of several words; no element of HTML has.
_CLINE_BLOCK = re.compile(r"^[ \t]*<([a-z]+(?:_[a-z0-9]+)+)>\s*", re.MULTILINE)
_CLINE_PARAMETER = re.compile(r"<(\w{1,256})>")
_CLINE_CLOSING = re.compile(r"</(\w{1,256})>")
_SPACES = re.compile(r"\s*")
_REACT = re.compile(r"^Action[ \t]*:[ \t]*(\S[^\n]*)\n+Action Input[ \t]*:[ \t]*", re.MULTILINE)
_REACT_END = re.compile(r"(?=\n(?:Observation|Action[ \t]*:))|\Z")


def _blocks(text: str, kind: tuple[re.Pattern[str], re.Pattern[str]]) -> Iterator[tuple[re.Match[str], str, int]]:
    """Each opening, what stands between it and the first closing after it, and where that ends."""
    opening, closing = kind
    at = 0
    while (begin := opening.search(text, at)) and (end := closing.search(text, begin.end())):
        yield begin, text[begin.end() : end.start()], end.end()
        at = end.end()


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
    for begin, body, end in _blocks(text, _HERMES):
        call = _json(body)
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = call.get("arguments", call.get("parameters", {}))
            arguments = _json(arguments) if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict):
                yield WrittenCalls(begin.start(), end, ((call["name"], arguments),))


def _qwen(text: str) -> Iterator[WrittenCalls]:
    for begin, body, end in _blocks(text, _QWEN_BLOCK):
        arguments = {parameter[1]: _value(value) for parameter, value, _ in _blocks(body, _QWEN_PARAMETER)}
        yield WrittenCalls(begin.start(), end, ((begin[1], arguments),))


def _dsml(text: str) -> Iterator[WrittenCalls]:
    at, never_closed = 0, set[str]()
    while begin := _DSML_BLOCK.search(text, at):
        at = begin.end()
        closing = f"</｜DSML｜{begin[1]}>"
        end = -1 if closing in never_closed else text.find(closing, at)
        if end < 0:
            never_closed.add(closing)
            continue
        calls = tuple((call[1], dict(_dsml_arguments(body))) for call, body, _ in _blocks(text[at:end], _DSML_CALL))
        at = end + len(closing)
        yield WrittenCalls(begin.start(), at, calls)


def _dsml_arguments(body: str) -> Iterator[tuple[str, Any]]:
    for parameter, value, _ in _blocks(body, _DSML_PARAMETER):
        yield parameter[1], value if parameter[2] == "true" else _value(value)


def _vcp(text: str) -> Iterator[WrittenCalls]:
    for begin, body, end in _blocks(text, _VCP_BLOCK):
        fields = {field[1]: value.strip() for field, value, _ in _blocks(body, _VCP_FIELD)}
        name = fields.pop("tool_name", None)
        if name:
            yield WrittenCalls(begin.start(), end, ((name, fields),))


def _cline(text: str) -> Iterator[WrittenCalls]:
    at = 0
    closings: dict[str, list[int]] = {}
    while begin := _CLINE_BLOCK.search(text, at):
        if not at:
            for closing in _CLINE_CLOSING.finditer(text):
                closings.setdefault(closing[1], []).append(closing.start())
        at = begin.end()
        arguments, end = _cline_arguments(text, at, closings)
        closing_tag = f"</{begin[1]}>"
        if arguments and text.startswith(closing_tag, end):
            at = end + len(closing_tag)
            yield WrittenCalls(begin.start(), at, ((begin[1], arguments),))


def _cline_arguments(text: str, at: int, closings: Mapping[str, Sequence[int]]) -> tuple[dict[str, Any], int]:
    """The elements that follow each other from here on, and where what is none begins."""
    arguments: dict[str, Any] = {}
    while element := _CLINE_PARAMETER.match(text, at):
        places = closings.get(element[1], ())
        number = bisect_left(places, element.end())
        if number == len(places):
            break
        end = places[number]
        arguments[element[1]] = _value(text[element.end() : end].removeprefix("\n").removesuffix("\n"))
        spaces = _SPACES.match(text, end + len(f"</{element[1]}>"))
        assert spaces is not None, "it matches nothing as well"
        at = spaces.end()
    return arguments, at


def _react(text: str) -> Iterator[WrittenCalls]:
    for begin, body, end in _blocks(text, (_REACT, _REACT_END)):
        given = body.strip()
        arguments = _json(given)
        named = arguments if isinstance(arguments, dict) else {"input": given} if given else {}
        yield WrittenCalls(begin.start(), end, ((begin[1].rstrip(), named),))


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
    while piece := _GEMMA_PIECE.match(text, end):
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
    return _json("".join(written)), end


PARSERS: tuple[Parser, ...] = (_dsml, _gemma, _qwen, _hermes, _vcp, _cline, _react)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _value(text: str) -> Any:
    """An argument that is written without quotes: what reads as JSON other than a text is that."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value
