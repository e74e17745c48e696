"""DeepSeek-V4's conversations. The model comes without a chat template; its protocol is described beside its weights
(deepseek-ai/DeepSeek-V4-Pro, ``encoding/README.md``, MIT), and the wording that it was trained with is quoted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.messages import THINK_END, THINK_START
from twinkle.data_format.row_error import RowError

Turn = Mapping[str, Any]
Span = tuple[int, int]

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
DSML = "｜DSML｜"
EFFORTS = (None, "high", "max")

MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause,"
    " rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered"
    " alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_START}), you MUST output your complete reasoning inside \
{THINK_START}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_END = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


class DeepseekWriter:
    """Writes conversations for DeepSeek-V4, and knows what of them is the model's."""

    reads_reasoning = True

    def __init__(self, *, is_thinking: bool, reasoning_effort: str | None = None) -> None:
        if reasoning_effort not in EFFORTS:
            raise InvalidInput("reasoning_effort", f"is {reasoning_effort!r}; send 'high', 'max' or None")
        self._is_thinking = is_thinking
        self._effort = reasoning_effort

    def render(self, turns: Sequence[Turn], tools: Sequence[Turn] | None, *, add_generation_prompt: bool) -> str:
        """See :class:`twinkle.template.rendering.Renderer`."""
        return self._write(turns, tools, add_generation_prompt)[0]

    def generated_spans(self, turns: Sequence[Turn], tools: Sequence[Turn] | None) -> list[Span]:
        """See :class:`twinkle.template.rendering.Renderer`; one for each of the assistant's turns."""
        return self._write(turns, tools, False)[1]

    def _write(
        self, turns: Sequence[Turn], tools: Sequence[Turn] | None, add_generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        merged = _merged(turns)
        if tools and (not merged or merged[0]["role"] != "system"):
            merged.insert(0, {"role": "system", "content": ""})
        last_question = max((i for i, turn in enumerate(merged) if turn["role"] == "user"), default=-1)
        text = BEGIN + (MAX_EFFORT if self._is_thinking and self._effort == "max" else "")
        spans: list[Span] = []
        for index, turn in enumerate(merged):
            # With tools the thinking of earlier rounds stays; without, only that after the last question.
            keeps_thinking = self._is_thinking and (bool(tools) or index >= last_question)
            if turn["role"] == "system":
                text += turn["content"] + (_described(tools) if tools and index == 0 else "")
            elif turn["role"] == "user":
                text += USER + "\n\n".join(turn["blocks"])
                is_last = index == len(merged) - 1
                if (is_last and add_generation_prompt) or (not is_last and merged[index + 1]["role"] == "assistant"):
                    text += ASSISTANT + (THINK_START if keeps_thinking else THINK_END)
            else:
                thinking = turn.get("reasoning_content", "") + THINK_END if keeps_thinking else ""
                said = thinking + _text(turn) + _calls(turn.get("tool_calls") or []) + END
                spans.append((len(text), len(text) + len(said)))
                text += said
        return text, spans


def _merged(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns, with all that is said to the model between two of its answers as one; a tool's answers in the order
    of the calls.
    """
    merged: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    results: list[tuple[int, Turn]] = []
    for number, turn in enumerate(turns):
        role = turn["role"]
        if role in ("system", "assistant"):
            merged.append({**turn, "content": _text(turn)})
            order = {call["id"]: i for i, call in enumerate(turn.get("tool_calls") or []) if call.get("id")}
            results = []
            continue
        if role not in ("user", "tool"):
            raise RowError(f"messages[{number}].role", f"is {role}, which DeepSeek-V4 has not", message_number=number)
        if not merged or merged[-1]["role"] != "user":
            merged.append({"role": "user", "blocks": []})
        blocks: list[str] = merged[-1]["blocks"]
        if role == "user":
            blocks.append(_text(turn))
            continue
        results.append((len(blocks), turn))
        blocks.append("")
        in_order = sorted(
            (result for _, result in results), key=lambda result: order.get(str(result.get("tool_call_id")), 0)
        )
        for (place, _), result in zip(results, in_order, strict=True):
            blocks[place] = f"<tool_result>{_text(result)}</tool_result>"
    return merged


def _text(turn: Turn) -> str:
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise RowError("images", "are in the row, but DeepSeek-V4 takes text alone")
    return "\n\n".join(part["text"] for part in content)


def _described(tools: Sequence[Turn]) -> str:
    functions = [tool.get("function", tool) for tool in tools]
    return "\n\n" + TOOLS + "\n".join(_json(function) for function in functions) + TOOLS_END


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return ""
    written = [
        f'<{DSML}invoke name="{call["function"]["name"]}">\n'
        + "\n".join(_parameter(name, value) for name, value in call["function"]["arguments"].items())
        + f"\n</{DSML}invoke>"
        for call in calls
    ]
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(written) + f"\n</{DSML}tool_calls>"


def _parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    kind = "true" if is_text else "false"
    return f'<{DSML}parameter name="{name}" string="{kind}">{value if is_text else _json(value)}</{DSML}parameter>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
