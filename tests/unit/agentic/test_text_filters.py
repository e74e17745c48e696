"""Filters by what texts are made of: shares by hand, near duplicates, languages, calls of tools."""

import json

import pytest

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle_agentic.preprocessor import (
    AgentTraceFilter,
    AlphanumericFilter,
    CharRepeatFilter,
    FlaggedWordsFilter,
    LanguageFilter,
    MinHashDedupFilter,
    ToolCallNormalizer,
    WordRepeatFilter,
)

BIRD = "A bird beats its wings, which push the air down, and so the air pushes the bird up into the sky."


def said(text, role="assistant"):
    return {"messages": [{"role": "user", "content": "?"}, {"role": role, "content": text}]}


@pytest.mark.parametrize(
    ("one", "text", "share"),
    [
        # (a b) twice, (b a) and (b c) once: 2 of 4.
        (WordRepeatFilter(rep_len=2), "a b A b, c", 2 / 4),
        (WordRepeatFilter(rep_len=3), "a b", None),
        # ab four times, ba three times; of two runs the most frequent counts: 4 of 7.
        (CharRepeatFilter(rep_len=2), "abababab", 4 / 7),
        # Five runs, each once.
        (CharRepeatFilter(rep_len=2), "abcdef", 0.0),
        (CharRepeatFilter(rep_len=2), "a", None),
        (AlphanumericFilter(), "ab1 水!", 4 / 6),
        (AlphanumericFilter(), "", None),
        (FlaggedWordsFilter(words=["Frog"]), "The frog, a FROG!", 2 / 4),
        (FlaggedWordsFilter(words=["Frog"]), "...", None),
    ],
)
def test_shares_are_those_of_the_formulas(one, text, share):
    assert one.share(text) == share


@pytest.mark.parametrize(
    ("one", "bad", "why"),
    [
        (WordRepeatFilter(), "and so it goes on and on without any end " * 9, "words repeated"),
        (CharRepeatFilter(), "哈" * 60, "characters repeated"),
        (AlphanumericFilter(), "$$$ %%% a", "few letters"),
        (FlaggedWordsFilter(words=["frog"]), "frog frog frog", "flagged words"),
    ],
)
def test_a_share_out_of_bounds_drops_a_row_and_one_within_keeps_it(one, bad, why):
    kept, left = one([said(BIRD), said(bad), said(bad, role="system")])
    assert kept == [said(BIRD), said(bad, role="system")] and [row["dropped_for"] for row in left] == [why]


def test_words_to_flag_come_from_a_file_or_a_folder_of_languages(tmp_path):
    (tmp_path / "de.txt").write_text("Frosch\n\n", encoding="utf-8")
    for words in (tmp_path, tmp_path / "de.txt"):
        assert FlaggedWordsFilter("de", words=words).share("ein Frosch") == 0.5
    for words in (None, [], tmp_path / "en.txt", tmp_path):
        with pytest.raises(InvalidInput) as refused:
            FlaggedWordsFilter(words=words)
        assert refused.value.field == "words"


def exact_jaccard(one, other, size=5):
    first, second = ({text[i : i + size] for i in range(len(text) - size + 1)} for text in (one.lower(), other.lower()))
    return len(first & second) / len(first | second)


def test_of_texts_that_share_most_of_their_shingles_the_first_stays():
    near, far = BIRD.replace("sky", "sun"), BIRD.replace("wings", "legs").replace("air", "mud").replace("bird", "crab")
    assert exact_jaccard(BIRD, near) > 0.9 and exact_jaccard(BIRD, far) < 0.5
    one = MinHashDedupFilter()
    rows = [said(BIRD), said(near), said(far), said(BIRD.upper().replace(" ", "  ")), said(""), said("")]
    # In two calls: what is seen is remembered.
    assert one.apply(rows[:1]) == rows[:1]
    assert one.apply(rows[1:]) == [rows[2], rows[4], rows[5]] and one.dropped == {"nearly seen before": 2}
    by_words = MinHashDedupFilter("space", window_size=1, jaccard_threshold=1.0)
    assert by_words.apply([said("a b c"), said("c, b, a"), said("a b d")]) == [said("a b c"), said("a b d")]


def test_rows_are_kept_by_their_language():
    german = said("Ein Vogel schlägt mit den Flügeln und fliegt deshalb in den blauen Himmel.")
    chinese = said("这座水车在河边，是两兄弟一八零四年建的。它很老，但还在转动。")
    rows = [said(BIRD), german, chinese, said("42")]
    one = LanguageFilter(["en", "zh"])
    kept = one.apply(rows)
    assert [row["language"] for row in kept] == ["en", "zh", None] and one.dropped == {"in de": 1}
    assert len(LanguageFilter("de", role="user").apply([{"messages": [{"role": "user", "content": "1"}]}])) == 1
    unsure = LanguageFilter(min_score=1.0)
    assert unsure.apply([said("ok")]) == [] and unsure.dropped == {"language not sure": 1}


HERMES = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REACT = "Thought: hm\nAction: look\nAction Input: here"


def test_conversations_with_tools_are_told_from_others():
    rows = [
        said(BIRD),
        said(HERMES),
        said(REACT),
        said("3", role="tool"),
        {"messages": [{"role": "assistant", "content": "", "tool_calls": '[{"function": {"name": "add"}}]'}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": "[]"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": None}]},
        said(HERMES, role="user"),
    ]
    kept = AgentTraceFilter().apply(rows)
    assert [row["is_agent"] for row in kept] == [False, True, True, True, True, False, False, False]


def test_calls_in_texts_become_calls_and_their_results_messages_of_tools():
    row = {
        "messages": [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": HERMES + HERMES.removeprefix("Let me see.")},
            {"role": "user", "content": "<tool_response>\n1\n</tool_response>\n<tool_response>2</tool_response>"},
            {"role": "assistant", "content": REACT},
            {"role": "user", "content": "Observation: nothing\nat all"},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "Observation: it rains."},
        ],
        "id": 7,
    }
    (normal,) = ToolCallNormalizer().apply([row])
    first, second = normal["messages"][1], normal["messages"][4]
    assert first["content"] == "Let me see." and [call["id"] for call in first["tool_calls"]] == ["call_0", "call_1"]
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert [call["id"] for call in second["tool_calls"]] == ["call_2"]
    told = [message for message in normal["messages"] if message["role"] == "tool"]
    assert told == [
        {"role": "tool", "content": "1", "tool_call_id": "call_0"},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        {"role": "tool", "content": "nothing\nat all", "tool_call_id": "call_2"},
    ]
    # What a user says after an answer without a call is the user's.
    assert normal["messages"][-1] == row["messages"][-1] and normal["id"] == 7
    assert ToolCallNormalizer().apply([normal]) == [normal] and ToolCallNormalizer().apply([said(BIRD)]) == [said(BIRD)]


def test_calls_that_came_as_json_text_become_a_list():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    (normal,) = ToolCallNormalizer().apply(
        [{"messages": [{"role": "assistant", "content": "", "tool_calls": json.dumps([call])}]}]
    )
    assert normal["messages"][0]["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: WordRepeatFilter(rep_len=0), "rep_len"),
        (lambda: CharRepeatFilter(max_ratio=2.0), "max_ratio"),
        (lambda: AlphanumericFilter(min_ratio=-1.0), "min_ratio"),
        (lambda: MinHashDedupFilter("sound"), "tokenization"),
        (lambda: MinHashDedupFilter(window_size=0), "window_size"),
        (lambda: MinHashDedupFilter(num_permutations=1), "num_permutations"),
        (lambda: MinHashDedupFilter(jaccard_threshold=0.0), "jaccard_threshold"),
        (lambda: LanguageFilter("xx"), "lang"),
        (lambda: LanguageFilter(min_score=2.0), "min_score"),
    ],
)
def test_wrong_settings_are_refused_by_their_name(make, field):
    with pytest.raises(InvalidInput) as refused:
        make()
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("make", "package"), [(MinHashDedupFilter, "datasketch"), (LanguageFilter, "py3langid.langid")]
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, make, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=r"twinkle-queue\[refine\]"):
        make()
