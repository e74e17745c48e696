"""Long conversations made shorter, and their originals on demand."""

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle_agentic.chunker.native import NativeChunker
from twinkle_agentic.condenser import KeywordCondenser, ModelCondenser
from twinkle_agentic.condenser.keyword import word_scores
from twinkle_agentic.rollout import MultiTurnCondenseRollout
from twinkle_agentic.tools import ExtractCondensed, ToolManager

PASSAGE = "The mill stands by the river. It was built in 1804 by two brothers. " * 10
ROW = {
    "messages": [
        {"role": "system", "content": PASSAGE},
        {"role": "user", "content": "Question: who built it?\n\n" + PASSAGE},
    ]
}


class Brief:
    """A sampler that answers with one text."""

    def __init__(self, text):
        self.text, self.prompts, self.calls = text, [], []

    def sample(self, prompts, params, **call):
        self.prompts += prompts
        self.calls.append((len(prompts), params, call))
        return [{"sequences": [{"decoded": self.text}]} for _ in prompts]


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_passages_put_together_are_the_text_and_none_is_too_long(size):
    for text in (PASSAGE, "x" * 120, "", "a.\n\n\nb. c!\n" * 9):
        passages = NativeChunker(size).split(text)
        assert "".join(passages) == text and all(0 < len(passage) <= size for passage in passages)
    assert NativeChunker(60).split("One two. Three four. " * 4)[0].endswith(". ")


def test_long_passages_are_shortened_and_their_originals_can_be_asked_for():
    chunks = NativeChunker(400)(ROW)
    brief = Brief("Mill; 1804; two brothers.")
    condenser = ModelCondenser(
        brief,
        compression_ratio=4.0,
        min_budget_chars=50,
        related_query=lambda chunk: "who built it?" if "Question:" in chunk.content else None,
    )

    shorter = condenser(chunks)

    row = shorter.to_trajectory()
    assert row["messages"][0] == ROW["messages"][0]
    assert "<block_0>\nMill; 1804; two brothers.\n</block_0>" in row["messages"][1]["content"]
    assert all("who built it?" in prompt["messages"][1]["content"] for prompt in brief.prompts)
    assert "".join(shorter.originals()) == ROW["messages"][1]["content"]
    tools = ToolManager([ExtractCondensed(shorter.originals())])
    call = {"function": {"name": "extract_condensed", "arguments": {"block": 0}}}
    assert tools(call) == shorter.originals()[0]
    call["function"]["arguments"] = {"block": 99}
    assert "99 is none" in tools(call)


def test_what_does_not_come_out_shorter_stays_as_it_is():
    chunks = NativeChunker(400)(ROW)
    assert ModelCondenser(Brief("long " * 500))(chunks) == chunks
    assert ModelCondenser(Brief(""))(chunks) == chunks
    assert ModelCondenser(Brief("s"), skip_pattern="mill")(chunks) == chunks
    assert ModelCondenser(Brief("s"), rounds=[0])(chunks) == chunks
    assert chunks.to_trajectory() == ROW


def test_passages_go_in_batches_to_the_base_model_or_to_an_adapter():
    brief = Brief("short")
    ModelCondenser(brief, batch_size=1, min_budget_chars=50)(NativeChunker(400)(ROW))
    assert [count for count, _, _ in brief.calls] == [1] * len(brief.calls)
    assert brief.calls[0][2] == {"use_base_model": True} and brief.calls[0][1]["temperature"] == 0.0
    other = Brief("short")
    ModelCondenser(other, lora_path="a", min_budget_chars=50)(NativeChunker(400)(ROW))
    assert other.calls[0][2] == {"adapter_path": "a"}


def test_a_real_sampler_shortens(model_id):
    sampler = TorchSampler(model_id)
    sampler.set_template(Template, model_id=model_id)
    condenser = ModelCondenser(sampler, min_budget_chars=20, sampling_params={"max_tokens": 4, "stop": []})
    shorter = condenser(NativeChunker(400)(ROW))
    assert shorter.originals()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"compression_ratio": 1.0}, "compression_ratio"),
        ({"batch_size": 0}, "batch_size"),
        ({"user_prompt_template": "{text}"}, "user_prompt_template"),
    ],
)
def test_wrong_settings_are_refused_by_their_name(settings, field):
    with pytest.raises(InvalidInput) as refused:
        ModelCondenser(Brief(""), **settings)
    assert refused.value.field == field


class Asking(Template):
    """Takes the first turn for a call of the tool that tells originals, and no other."""

    def parse_tool_call(self, text):
        if "ask" not in text:
            return []
        return [
            {"id": "call_0", "type": "function", "function": {"name": "extract_condensed", "arguments": {"block": 0}}}
        ]


class Speaking:
    """A sampler that asks for an original in its first turn, and then answers."""

    def __init__(self, tokenizer):
        self._tokenizer, self.rows = tokenizer, []

    def sample(self, rows, params, **call):
        self.rows.append(rows)
        tokens = self._tokenizer.encode("ask" if len(self.rows) == 1 else "said", add_special_tokens=False)
        sequence = {"tokens": tokens, "stop_reason": "stop", "logprobs": [[(token, -0.5)] for token in tokens]}
        return [{"sequences": [sequence]} for _ in rows]


def test_a_rollout_condenses_equal_conversations_once_and_tells_their_originals(model_id):
    template = Asking(model_id)
    brief, speaking = Brief("Mill; 1804."), Speaking(template.tokenizer)
    short = {"messages": [{"role": "user", "content": "ask?"}]}
    rollout = MultiTurnCondenseRollout(
        speaking,
        template,
        ToolManager(),
        NativeChunker(400),
        ModelCondenser(brief, min_budget_chars=50),
        max_turns=2,
        post_compress_callback=lambda row, chunks, mark: {**row, "mark": mark, "blocks": len(chunks.originals())},
    )

    first, second, plain = rollout([ROW, dict(ROW), short], mark=3)

    assert len(brief.calls) == 1 and len(brief.prompts) == first["blocks"] == second["blocks"]
    assert first["messages"] == second["messages"] and "<block_0>\nMill; 1804." in first["messages"][1]["content"]
    told = first["messages"][3]
    assert told["role"] == "tool" and ROW["messages"][1]["content"].startswith(told["content"])
    assert first["tools"] == [ExtractCondensed([]).tool_info()] and "tools" not in plain
    assert plain["messages"][2]["content"].startswith("Error: there is no tool") and plain["mark"] == 3
    assert [token for token in first["labels"] if token >= 0] == [pair[0][0] for pair in first["logprobs"]]


def test_what_is_wrong_with_a_call_is_told_before_anything_is_condensed(model_id):
    brief = Brief("Mill.")
    condenser = ModelCondenser(brief, min_budget_chars=50)
    rollout = MultiTurnCondenseRollout(Brief(""), Template(model_id), ToolManager(), NativeChunker(400), condenser)
    with pytest.raises(InvalidInput, match="num_samples"):
        rollout([ROW], sampling_params={"num_samples": 2})
    with pytest.raises(InvalidInput, match="tool_manager: are 2 for 1"):
        rollout([ROW], tool_manager=[ToolManager(), ToolManager()])
    assert brief.calls == []


def test_a_rollout_that_cannot_condense_is_refused_by_what_is_wrong(model_id):
    template = Template(model_id)
    with pytest.raises(InvalidInput, match="condenser: is missing"):
        MultiTurnCondenseRollout(Brief(""), template, chunker=NativeChunker(9))
    taken = ToolManager([ExtractCondensed([])])
    rollout = MultiTurnCondenseRollout(Brief(""), template, taken, NativeChunker(9), ModelCondenser(Brief("")))
    with pytest.raises(InvalidInput, match="extract_condensed already"):
        rollout([ROW])
    with pytest.raises(InvalidInput, match="send a list"):
        rollout(ROW)


def test_keywords_and_the_sentences_that_hold_most_of_them_stand_for_a_passage():
    # By hand: "red fox" and "red deer" are the runs of words; red occurs twice in runs of two, so 4 / 2 = 2.
    assert word_scores("The red fox and the red deer.") == {"red": 2.0, "fox": 2.0, "deer": 2.0}
    text = "We saw it. Steam engines drive looms. It is so. " + "And so it was. " * 20
    # Words of the run of four score 4 each: all above the filler, which has only stop words and "saw" (1).
    assert word_scores(text) == {"saw": 1.0, "steam": 4.0, "engines": 4.0, "drive": 4.0, "looms": 4.0}
    condenser = KeywordCondenser(num_relations=1, num_keywords=2)
    assert condenser.condensed(text) == "We saw it.\nSteam engines drive looms.\n[saw]"
    assert condenser.condensed("   ") == ""
    assert (
        KeywordCondenser(num_relations=0, num_keywords=1).condensed("水车在河边。水车很老。" * 10)
        == "水车在河边。\n[水车]"
    )


def test_a_passage_in_keywords_is_a_block_whose_original_can_be_asked_for():
    chunks = NativeChunker(400)(ROW)
    shorter = KeywordCondenser()(chunks)
    row = shorter.to_trajectory()
    assert row["messages"][0] == ROW["messages"][0] and "<block_0>" in row["messages"][1]["content"]
    assert len(row["messages"][1]["content"]) < len(ROW["messages"][1]["content"]) / 2
    assert "".join(shorter.originals()) == ROW["messages"][1]["content"]
    assert KeywordCondenser(rounds=[0])(chunks).originals() == [] == KeywordCondenser(min_chars=500)(chunks).originals()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"compression_ratio": 1.0}, "compression_ratio"),
        ({"num_relations": -1}, "num_relations"),
        ({"max_first_sentence_chars": 0}, "max_first_sentence_chars"),
        ({"num_keywords": -1}, "num_keywords"),
        ({"min_chars": -1}, "min_chars"),
    ],
)
def test_wrong_settings_of_keywords_are_refused_by_their_name(settings, field):
    with pytest.raises(InvalidInput) as refused:
        KeywordCondenser(**settings)
    assert refused.value.field == field
