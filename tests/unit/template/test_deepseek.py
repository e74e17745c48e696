"""DeepSeek-V4's protocol, as the examples beside its weights have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.chat_templates import TEXTS
from twinkle.core.errors import InvalidInput
from twinkle.data_format.deepseek import BEGIN, DSML, END
from twinkle.hub.tiny import train_tokenizer
from twinkle.template import DeepseekV4Template, RowError

USER = {"role": "user", "content": "What's the weather in Beijing?"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def call(identity: str, **arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = train_tokenizer(TEXTS, vocab_size=320, context=4096)
    special = [BEGIN, END, "<｜User｜>", "<｜Assistant｜>", DSML]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = None
    target = tmp_path_factory.mktemp("deepseek")
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def template(folder: Path) -> DeepseekV4Template:
    return DeepseekV4Template(str(folder))


def test_a_prompt_opens_the_thinking_or_closes_it(folder: Path, template: DeepseekV4Template) -> None:
    row = {"messages": [{"role": "system", "content": "You are a helpful assistant."}, {**USER, "content": "2+2?"}]}
    chat = DeepseekV4Template(str(folder), enable_thinking=False)

    head = f"{BEGIN}You are a helpful assistant.<｜User｜>2+2?<｜Assistant｜>"
    assert template.format_trajectory(row, add_generation_prompt=True) == f"{head}<think>"
    assert chat.format_trajectory(row, add_generation_prompt=True) == f"{head}</think>"


def test_thinking_of_earlier_rounds_is_left_out_and_what_is_written_trains(template: DeepseekV4Template) -> None:
    answers = [{"role": "assistant", "content": f"a{i}", "reasoning_content": f"t{i}"} for i in range(2)]
    row = {"messages": [USER, answers[0], USER, answers[1]]}

    asked = "<｜User｜>What's the weather in Beijing?<｜Assistant｜>"
    assert template.format_trajectory(row) == f"{BEGIN}{asked}</think>a0{END}{asked}<think>t1</think>a1{END}"
    assert template.decode(template.encode(row)["labels"]) == f"a0{END}t1</think>a1{END}"
    second = template.encode({**row, "user_data": [("key_rounds", [3])]})
    assert template.decode(second["labels"]) == f"t1</think>a1{END}"


def test_tools_are_described_called_and_answered_in_the_order_of_the_calls(template: DeepseekV4Template) -> None:
    calls = [call("a", location="Beijing", days=2), call("b")]
    messages = [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
        {"role": "assistant", "content": "Warm.", "reasoning_content": "So."},
        {"role": "user", "content": "And now?"},
    ]

    text = template.format_trajectory({"messages": messages, "tools": TOOLS}, add_generation_prompt=True)

    assert text.startswith(f"{BEGIN}\n\n## Tools\n\nYou have access") and '{"name": "get_weather", "para' in text
    assert text.endswith(
        "<｜Assistant｜><think>Ask.</think>\n\n"
        f'<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="location" string="true">Beijing</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="get_weather">\n\n</{DSML}invoke>\n</{DSML}tool_calls>{END}'
        "<｜User｜><tool_result>first</tool_result>\n\n<tool_result>second</tool_result><｜Assistant｜>"
        f"<think>So.</think>Warm.{END}<｜User｜>And now?<｜Assistant｜><think>"
    )
    assert [read["function"]["name"] for read in template.parse_tool_call(text.partition("Ask.")[2])] == [
        "get_weather"
    ] * 2


def test_effort_comes_first_and_other_efforts_are_refused(folder: Path) -> None:
    most = DeepseekV4Template(str(folder), reasoning_effort="max")

    assert most.format_trajectory({"messages": [USER]}).startswith(f"{BEGIN}Reasoning Effort: Absolute maximum")
    with pytest.raises(InvalidInput, match="reasoning_effort: is 'little'"):
        DeepseekV4Template(str(folder), reasoning_effort="little").encode({"messages": [USER]})
    with pytest.raises(RowError, match=r"messages\[0\].role: is developer"):
        most.encode({"messages": [{"role": "developer", "content": "x"}]})
