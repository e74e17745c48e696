"""Calls of tools are found in the ways that models write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.chat_templates import save_tokenizer
from twinkle.data_format.tool_calls import parse_tool_calls, without_tool_calls
from twinkle.template import Template

WRITTEN: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": "{\\"b\\": \\"}\\"}"}\n</tool_call>',
        [("f", {"a": 1}), ("g", {"b": "}"})],
    ),
    "hermes, its end cut off": ('Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}', [("f", {})]),
    "qwen3.5": (
        "Let me see.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [("f", {"a": 1, "b": "x\ny"}), ("g", {})],
    ),
    "deepseek": (
        'Let me see.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">[2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [("f", {"a": "1", "b": [2]}), ("g", {})],
    ),
    "gemma 4": (
        'Let me see.<|tool_call>call:f{a:1,b:<|"|>x, {y}: "z"<|"|>,c:{d:[true,null,<|"|>e<|"|>],f:-2.5}}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        [("f", {"a": 1, "b": 'x, {y}: "z"', "c": {"d": [True, None, "e"], "f": -2.5}}), ("g", {})],
    ),
    "gemma 4, its end cut off": ('Let me see.<|tool_call>call:f{a:<|"|>1<|"|>}', [("f", {"a": "1"})]),
    "cline": (
        "Let me see.\n<read_file>\n<path>src/main.py</path>\n<lines>3</lines>\n</read_file>",
        [("read_file", {"path": "src/main.py", "lines": 3})],
    ),
    "vcp": (
        "Let me see.\n<<<[TOOL_REQUEST]>>>\nmaid:「始」me「末」,\ntool_name:「始」f「末」,\na:「始」x, y「末」\n"
        "<<<[END_TOOL_REQUEST]>>>",
        [("f", {"maid": "me", "a": "x, y"})],
    ),
    "react": (
        'Let me see.\nAction: f\nAction Input: {"a": 1}\nObservation:',
        [("f", {"a": 1})],
    ),
    "react with text": ("Let me see.\nAction: search\nAction Input: Paris", [("search", {"input": "Paris"})]),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_calls_are_found_with_their_arguments_and_cut_out_of_the_text(kind: str) -> None:
    text, expected = WRITTEN[kind]

    calls = parse_tool_calls(text)

    assert [(call["function"]["name"], json.loads(str(call["function"]["arguments"]))) for call in calls] == expected
    assert [call["id"] for call in calls] == [f"call_{number}" for number in range(len(expected))]
    assert without_tool_calls(text).removesuffix("Observation:").strip() == "Let me see."


@pytest.mark.parametrize(
    "text",
    [
        "Nothing is called.",
        "<tool_call>\n{not json}\n</tool_call>",
        "<|tool_call>call:f{a:",
        '<|tool_call>call:f{a:<|"|>x}<tool_call|>',
        "<|tool_call>call:f" + "{a:" * 20_000,
        '<tool_call>["f"]</tool_call>',
        "<think><b>no</b></think><answer><b>7</b></answer>",
        "<ul>\n<li>one</li>\n</ul>",
        "Action: is needed. No input follows.",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == []
    assert without_tool_calls(text) == text


HOSTILE: dict[str, tuple[str, str, str]] = {
    "a Cline block with elements and no end": ("<read_file>\n", "<path>a</path>\n", ""),
    "Cline blocks without an end": ("", "<read_file>\n<path>a</path>\n", ""),
    "Hermes calls without an end": ("", "<tool_call>{", ""),
    "Hermes calls with ends of others": ("", "<tool_call>{</tool_call>", ""),
    "nested JSON": ("<tool_call>", '{"a":', "}"),
    "functions without an end": ("", "<function=a>", ""),
    "parameters without an end": ("<function=a>", "<parameter=b>", "</function>"),
    "a parameter of nested lists": ("<function=a><parameter=b>", "[", "</parameter></function>"),
    "DeepSeek's blocks without an end": ("", "<｜DSML｜tool_calls>", ""),
    "VCP's blocks without an end": ("", "<<<[TOOL_REQUEST]>>>", ""),
    "a VCP word without a value": ("<<<[TOOL_REQUEST]>>>", "a", "<<<[END_TOOL_REQUEST]>>>"),
    "empty lines after a ReAct call": ("Action: a\nAction Input: b", "\n", ""),
    "spaces after a ReAct action": ("Action: a", " ", "x"),
    "a Gemma name without an end": ("<|tool_call>call:f{", "a", ""),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_is_written_is_read_in_time_that_grows_with_its_length_alone(kind: str) -> None:
    """What backtracks takes minutes or years here, so that it would end by the tests' limit of time."""
    before, again, after = HOSTILE[kind]
    text = before + again * 100_000 + after

    assert len(without_tool_calls(text)) <= len(text)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_what_a_template_writes_is_read_back(tmp_path: Path, name: str) -> None:
    template = Template(str(save_tokenizer(tmp_path, name)))
    arguments = {"city": "Paris", "days": 3, "exact": True, "near": ["Rome", "Oslo"]}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    row = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        ]
    }

    (read,) = template.parse_tool_call(template.format_trajectory(row))

    assert read["function"]["name"] == "weather" and json.loads(str(read["function"]["arguments"])) == arguments


def test_a_prompt_goes_on_with_what_was_sampled(tmp_path: Path) -> None:
    template = Template(str(save_tokenizer(tmp_path)))
    prompt = template.encode({"messages": [{"role": "user", "content": "?"}], "user_data": [("a", "b")]}, True)
    said = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tokens = template.tokenizer(said + "<|im_end|>")["input_ids"]

    row = template.concat_input_feature(prompt, tokens)

    assert row["input_ids"] == [*prompt["input_ids"].tolist(), *tokens]
    assert row["labels"] == [-100] * (prompt["length"] - 1) + [*tokens, -100]
    assert row["position_ids"] == list(range(row["length"])) and row["user_data"] == [("a", "b")]
    assert row["messages"][-1]["content"].startswith("Let me see.")
    assert row["messages"][-1]["tool_calls"][0]["function"]["name"] == "f"
    assert template.clean_tool_call(said) == "Let me see."
    json.dumps(row)
