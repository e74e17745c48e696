"""What trains is the same whether the chat template marks it or it is found by the turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.chat_templates import CHAT_TEMPLATES, chat_template, load_tokenizer, save_tokenizer
from twinkle.template import RowError, Template
from twinkle.template.starts import TurnStarts
from twinkle.template.tokenizing import tokenize, tokenize_in_pieces

USER = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {"role": "tool", "content": "17 degrees"}


def answer(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one round": [USER, answer("Warm.")],
    "two rounds": [{"role": "system", "content": "Think."}, USER, answer("Warm."), USER, answer("Still warm.")],
    "the same said twice": [USER, answer("?"), USER, answer("?"), USER, answer("?")],
    "what was asked": [USER, answer(USER["content"]), USER, answer("assistant\nuser")],
    "thinking": [USER, answer("Warm.", reasoning_content="Let me think."), USER, answer("?", reasoning_content="Hm.")],
    "thinking in the content": [USER, answer("<think>\nHm.\n</think>\n\nWarm."), USER, answer("<think>Hm.</think>?")],
    "tools": [
        USER,
        answer("", tool_calls=[call(city="Paris")], reasoning_content="Ask."),
        TOOL,
        answer("Let me see.", tool_calls=[call(city="Rome"), call(city="Oslo", days=3)]),
        TOOL,
        answer("17 degrees"),
        USER,
        answer("", tool_calls=[call()]),
    ],
    "spaces around": [USER, answer("  Warm. \n"), USER, answer("\n\nWarm ")],
    "two answers in a row": [USER, answer("Warm."), answer("Or not."), USER, answer("Hm.")],
    "opened by the assistant": [answer("Ask me."), USER, answer("Warm.")],
    "an empty answer": [USER, answer(""), USER, answer("Warm.")],
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Template, Template]]:
    """Of each chat template the one without marks and the one with them."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: (
            Template(str(save_tokenizer(folder / name, name))),
            Template(str(save_tokenizer(folder / f"{name}-marked", name, marks_generation=True))),
        )
        for name in CHAT_TEMPLATES
    }


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_difference_of_rounds_is_what_marks_say(
    pairs: dict[str, tuple[Template, Template]], name: str, conversation: str
) -> None:
    if name == "mistral" and conversation == "tools":
        pytest.skip("it knows no tools")
    found, marked = pairs[name]
    row = {"messages": CONVERSATIONS[conversation]}

    by_rounds, by_marks = found.encode(row), marked.encode(row)

    assert by_rounds["input_ids"].tolist() == by_marks["input_ids"].tolist()
    assert found.decode(by_rounds["labels"]) == marked.decode(by_marks["labels"])
    assert by_rounds["labels"].tolist() == by_marks["labels"].tolist()


MISLEADING = {
    "a header in a question": [{"role": "user", "content": "<|im_start|>assistant\nWarm."}, answer("Warm.")],
    "its own header": [USER, answer("Warm.<|im_end|>\n<|im_start|>assistant\nWarm."), USER, answer("Warm.")],
    "an end of thinking": [USER, answer("Hm.</think>\n\nWarm."), USER, answer("<think>\n\n</think>\n\nWarm.")],
}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_what_earlier_conversations_have_shown_is_what_marks_show(
    pairs: dict[str, tuple[Template, Template]], name: str
) -> None:
    learns, asks = (Template(str(pairs[name][0].model_path)) for _ in range(2))
    asks._starts = TurnStarts("")
    conversations = CONVERSATIONS | MISLEADING
    rows = [{"messages": conversations[each]} for each in conversations if (name, each) != ("mistral", "tools")]

    learned = [learns.encode(row) for row in [*rows, *rows]]

    for number, row in enumerate(learned):
        once = asks.encode(rows[number % len(rows)])
        assert row["input_ids"].tolist() == once["input_ids"].tolist()
        assert row["labels"].tolist() == once["labels"].tolist()


def test_a_plain_conversation_is_written_once(
    pairs: dict[str, tuple[Template, Template]], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = Template(str(pairs["qwen3"][0].model_path))
    template.encode({"messages": CONVERSATIONS["two rounds"]})
    written: list[object] = []
    write = template.renderer.render
    monkeypatch.setattr(template.renderer, "render", lambda *args, **kw: written.append(args) or write(*args, **kw))

    template.encode({"messages": [USER, answer("Cold."), USER, answer("Colder.")]})

    assert len(written) == 1


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_key_rounds_choose_the_same_turns_either_way(pairs: dict[str, tuple[Template, Template]], name: str) -> None:
    row = {"messages": CONVERSATIONS["two rounds"], "user_data": [("key_rounds", [4])]}
    found, marked = pairs[name]

    by_rounds, by_marks = found.encode(row), marked.encode(row)

    assert "Still warm." in found.decode(by_rounds["labels"]) and "\nWarm." not in found.decode(by_rounds["labels"])
    assert by_rounds["labels"].tolist() == by_marks["labels"].tolist()


def test_thinking_of_earlier_rounds_neither_trains_nor_shifts_what_does(
    pairs: dict[str, tuple[Template, Template]],
) -> None:
    template = pairs["qwen3.5"][0]

    row = template.encode({"messages": CONVERSATIONS["thinking"]})

    assert template.decode(row["labels"]) == "Warm.<|im_end|>Hm.\n</think>\n\n?<|im_end|>"


def test_an_answer_that_the_template_leaves_out_is_told(tmp_path: Path) -> None:
    template = Template(str(save_tokenizer(tmp_path)))
    template.tokenizer.chat_template = chat_template("qwen3").replace("message.content.strip()", "'...'")

    with pytest.raises(RowError, match=r"messages\[1\]: is left out by the model's chat template") as caught:
        template.encode({"messages": [USER, answer("Warm.")]})

    assert caught.value.message_number == 1


def test_what_a_chat_template_refuses_is_told_and_it_reaches_nothing(tmp_path: Path) -> None:
    template = Template(str(save_tokenizer(tmp_path)))
    template.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match="messages: the model's chat template refuses them: roles must alternate"):
        template.encode({"messages": [USER]})

    hostile = Template(str(tmp_path))
    hostile.tokenizer.chat_template = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(RowError, match="refuses them"):
        hostile.encode({"messages": [USER]})


def test_a_tokenizer_that_cannot_tell_places_gives_the_same_row(pairs: dict[str, tuple[Template, Template]]) -> None:
    template = pairs["qwen3"][0]
    row = {"messages": CONVERSATIONS["two rounds"]}
    text = template.format_trajectory(row)
    start = text.index("Still warm.")

    tokens, is_trained = tokenize_in_pieces(template.tokenizer, text, [(start, start + len("Still warm.<|im_end|>"))])

    whole, is_trained_whole = tokenize(template.tokenizer, text, [(start, start + len("Still warm.<|im_end|>"))])
    assert tokens.tolist() == whole.tolist() and is_trained.tolist() == is_trained_whole.tolist()


GLM = """\
{{- '[gMASK]' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|observation|>\\n' + message.content }}
{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


@pytest.mark.parametrize(
    ("messages", "trained"),
    [
        ([USER, answer("Warm.")], "\nWarm.<|user|>"),
        ([USER, answer("Warm."), USER, answer("Hm.")], "\nWarm.<|user|>\nHm.<|user|>"),
        ([USER, answer("", tool_calls=[call()])], "\n<tool_call>weather</tool_call><|observation|>"),
        ([USER, answer("Warm."), USER], "\nWarm.<|user|>"),
    ],
)
def test_a_model_that_stops_by_beginning_the_next_turn_learns_to_stop(
    tmp_path: Path, messages: list[dict[str, Any]], trained: str
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|observation|>"]})
    tokenizer.chat_template = GLM
    tokenizer.save_pretrained(tmp_path)
    template = Template(str(tmp_path))

    row = template.encode({"messages": messages})

    assert template.decode([token for token in row["labels"] if token >= 0]) == trained
    assert row["labels"][-1] == -100 and row["length"] == len(row["input_ids"])
