"""Filters by quality: what leaves, and for which reason."""

import json
import math

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle_agentic.preprocessor import (
    ChrMinScorer,
    DeadLoopFilter,
    DedupFilter,
    FixUnicodeFilter,
    HardFilter,
    IFDScorer,
    IntentClassifier,
    JudgeFilter,
    MessageNormalizer,
    MessageSanityFilter,
    ModelFilter,
    ParaphraseScorer,
    PassNScorer,
    QualityPreprocessor,
    RefuseFilter,
    RemoveRepeatSentencesFilter,
    ScoreFilter,
    SpecialCharsFilter,
    TokenNumFilter,
    TokenSoupFilter,
    ToolCallNormalizer,
)


def chat(*texts, roles=("user", "assistant")):
    return {"messages": [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(texts)], "id": 1}


GOOD = chat("How does a bird fly?", "It beats its wings, which push air down, and so the air pushes the bird up.")


@pytest.mark.parametrize(
    ("make", "row", "reason"),
    [
        (HardFilter, {"messages": []}, "no messages"),
        (HardFilter, chat("x", roles=("alien",)), "unknown role"),
        (HardFilter, chat("x", roles=("assistant",)), "nobody asks"),
        (HardFilter, chat("x"), "no answer at the end"),
        (HardFilter, chat("x", "  "), "empty answer"),
        (
            MessageSanityFilter,
            chat("a", "b", "c", roles=("user", "user", "assistant")),
            "two turns of the user in a row",
        ),
        (MessageSanityFilter, chat("a", "b", roles=("tool", "assistant")), "tool's answer without a call"),
        (
            MessageSanityFilter,
            chat("a", "b", "c", roles=("user", "system", "assistant")),
            "system message in the middle",
        ),
        (lambda: MessageSanityFilter(["WINGS"]), GOOD, "sensitive word"),
        (RefuseFilter, chat("Do it.", "I’m sorry, but I can't help with that."), "refusal"),
        (RefuseFilter, chat("做吧", "抱歉，我无法回答这个问题。"), "refusal"),
        (DeadLoopFilter, chat("x", "the same line again\n" * 5), "one line again and again"),
        (TokenNumFilter, chat("a", "b"), "too short"),
        (lambda: TokenNumFilter(len, max_num=20), GOOD, "too long"),
        (SpecialCharsFilter, chat("x", "#$%&" * 20), "signs for the most part"),
        (TokenSoupFilter, chat("x", "foo bar " * 100), "few different words"),
        (
            TokenSoupFilter,
            chat("x", " ".join(f"wоrd{i}" for i in range(60))),  # with a Cyrillic o
            "scripts change within words",
        ),
    ],
)
def test_a_row_that_teaches_nothing_good_leaves_with_its_reason(make, row, reason):
    one = make()
    assert one.apply([row]) == [] and dict(one.dropped) == {reason: 1}


@pytest.mark.parametrize(
    "make", [HardFilter, MessageSanityFilter, RefuseFilter, DeadLoopFilter, SpecialCharsFilter, TokenSoupFilter]
)
@pytest.mark.parametrize(
    "row",
    [
        GOOD,
        chat("写一个函数", "可以使用Python编写一个函数，例如定义foo并返回结果。" * 3),
        chat("a", "I can help: sorry is a word like any other."),
        {
            "messages": [
                {"role": "user", "content": "add"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
                {"role": "tool", "content": "3"},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "7"},
            ]
        },
    ],
)
def test_good_rows_stay_as_they_are(make, row):
    assert make().apply([row]) == [row]


def test_one_call_made_again_and_again_is_a_loop():
    turn = [{"role": "assistant", "tool_calls": [{"function": {"name": "ls"}}]}, {"role": "tool", "content": "x"}]
    looping = DeadLoopFilter()
    assert looping.apply([{"messages": turn * 5}]) == [] and looping.apply([{"messages": turn * 4}])
    with pytest.raises(InvalidInput):
        DeadLoopFilter(max_repeats=0)


def test_calls_may_be_json_text_or_nothing_that_can_be_read():
    turn = [{"role": "assistant", "tool_calls": '[{"function": {"name": "ls"}}]'}, {"role": "tool", "content": "a"}]
    assert DeadLoopFilter().apply([{"messages": turn * 5}]) == []
    for calls in ("", "[]", "no JSON", "[3]", None):
        row = chat("How does a bird fly?", "It flies.")
        row["messages"][-1]["tool_calls"] = calls
        for stage in (DeadLoopFilter(), HardFilter(), MessageSanityFilter(check_content_integrity=True)):
            assert stage.apply([row]) == [row]
        assert ToolCallNormalizer().apply([row])


@pytest.mark.parametrize("said", ["<think>" * 30_000, "<tool_response>a</tool_response>" * 5_000 + "and more"])
def test_texts_are_judged_in_time_that_grows_with_their_length_alone(said):
    """What backtracks takes minutes or years here, so that it would end by the tests' limit of time."""
    row = {"messages": [*chat("?", "<tool_call>{}</tool_call>")["messages"], {"role": "user", "content": said}]}
    row["messages"][1]["tool_calls"] = [{"function": {"name": "ls"}}]
    assert ToolCallNormalizer().apply([row]) and RefuseFilter().apply([chat("?", said)])
    assert DeadLoopFilter(max_repeats=10**6, repetition_threshold=1.0).apply([chat("?", said)])


def test_the_first_of_like_conversations_stays():
    alike = chat("how does a BIRD fly", GOOD["messages"][1]["content"].replace(",", ""))
    assert DedupFilter().apply([GOOD, alike, chat("other", "answer")]) == [GOOD, chat("other", "answer")]


def test_texts_are_mended_in_every_part_of_a_message():
    row = {"messages": [{"role": "Human", "content": [{"type": "text", "text": " e\u0301\x00 "}, {"type": "image"}]}]}
    (mended,) = FixUnicodeFilter().apply(MessageNormalizer().apply([row]))
    assert mended["messages"] == [{"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "image"}]}]
    said = "This sentence is long enough. Yes. This sentence is long enough. Yes."
    (once,) = RemoveRepeatSentencesFilter().apply([chat("x", said)])
    assert once["messages"][1]["content"] == "This sentence is long enough. Yes. Yes."
    (cut,) = MessageSanityFilter().apply([chat("x", "y", "bye")])
    assert len(cut["messages"]) == 2


def test_what_a_conversation_is_about_is_named_by_its_questions():
    named = IntentClassifier().apply(
        [chat(text, "y") for text in ("Fix this bug", "把它翻译", "Solve it", "Why?", "Hi")]
    )
    assert [row["intent"] for row in named] == ["code", "translation", "math", "question", "chat"]


def test_a_model_judges_all_rows_in_one_call():
    class Judge:
        calls = 0

        def sample(self, prompts, params):
            self.calls += 1
            assert "bird" in prompts[0]["messages"][0]["content"] and params["temperature"] == 0.0
            return [{"sequences": [{"decoded": text}]} for text in ("0.9", "0.1 or so", "well", "7")]

    judge = Judge()
    one = JudgeFilter(judge, min_score=0.5)
    assert one.apply([GOOD] * 4) == [{**GOOD, "quality_score": 0.9}]
    assert judge.calls == 1 and dict(one.dropped) == {"low score": 1, "no score": 2}
    assert one.apply([]) == []


def test_the_whole_pipeline_takes_columns_and_reports_what_it_dropped():
    pipeline = QualityPreprocessor(dedup=True)
    rows = [GOOD, chat("x", "I'm sorry, but I cannot do that, as I said before and will say again."), GOOD]
    columns = pipeline.map_row_to_col(rows)

    kept = pipeline(columns)

    assert len(kept["messages"]) == 1 and kept["id"] == [1]
    assert pipeline.report() == "RefuseFilter: 1 dropped, refusal\nDedupFilter: 1 dropped, seen before"
    assert pipeline.dropped == {"refusal": 1, "seen before": 1}
    assert QualityPreprocessor().report() == "nothing was dropped"
    assert kept["intent"] == ["question"]
    assert pipeline({"messages": [], "id": []}) == {"messages": [], "id": [], "intent": []}


def test_a_list_of_rows_becomes_those_that_stay_and_those_that_leave_with_why():
    refusing = chat("x", "I'm sorry, but I cannot do that.")
    kept, left = RefuseFilter()([GOOD, refusing])
    assert kept == [GOOD] and left == [{**refusing, "dropped_by": "RefuseFilter", "dropped_for": "refusal"}]


def test_a_pipeline_of_ones_own_stages_writes_down_what_it_drops(tmp_path):
    def long_enough(rows):
        return [row for row in rows if len(row["messages"]) > 1], [row for row in rows if len(row["messages"]) == 1]

    def with_mark(rows):
        return [{**row, "mark": 1} for row in rows]

    log = tmp_path / "new" / "dropped.jsonl"
    pipeline = QualityPreprocessor([with_mark, RefuseFilter(), long_enough], str(log))
    kept = pipeline(pipeline.map_row_to_col([GOOD, chat("alone"), chat("x", "As an AI model I have no arms.")]))

    assert kept["id"] == [1] and pipeline.dropped == {"refusal": 1, "dropped": 1}
    assert pipeline.report() == "RefuseFilter: 1 dropped, refusal\nlong_enough: 1 dropped, dropped"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["dropped_by"], line["dropped_for"], line["mark"]) for line in lines] == [
        ("RefuseFilter", "refusal", 1),
        ("long_enough", "dropped", 1),
    ]
    with pytest.raises(InvalidInput) as refused:
        QualityPreprocessor([RefuseFilter(), DedupFilter])
    assert refused.value.field == "pipeline[1]"


def test_rows_are_kept_by_the_model_that_wrote_them():
    rows = [{**GOOD, "model_id": name} for name in ("Qwen/Qwen3-235B-A22B", "nobody/tiny", None)]
    assert ModelFilter().apply(rows) == rows[:1]
    own = ModelFilter(["nobody/", "a[bc]"], field="model_id")
    assert own.apply(rows) == rows[1:2] and own.dropped == {"model not wanted": 2}
    with pytest.raises(InvalidInput, match="patterns"):
        ModelFilter("qwen")
    assert QualityPreprocessor(model_filter=[ModelFilter()]).apply(rows)[0]["model_id"] == rows[0]["model_id"]


def test_turns_are_scored_by_how_much_their_question_tells_of_them(model_id):
    sampler, template = TorchSampler(model_id), Template(model_id)
    rows = [
        chat(
            "Why does a bird fly?", GOOD["messages"][1]["content"], "And then?", "It glides as long as it has height."
        ),
        chat("Yes?", "No."),
    ]
    kept = ScoreFilter(template, [IFDScorer(sampler, 0.0, 1e9)]).apply(rows)
    (row,) = kept
    assert row["user_data"] == [("key_rounds", [1, 3])] and len(row["scores"]["ifd"]) == 2

    answer = template.tokenizer(GOOD["messages"][1]["content"], add_special_tokens=False)["input_ids"]
    prompt = template.encode({"messages": rows[0]["messages"][:1]}, add_generation_prompt=True)["input_ids"].tolist()
    params = {"max_tokens": 0, "prompt_logprobs": 0}
    after, alone = (
        sampler.sample([{"input_ids": ids}], params)[0].prompt_logprobs[-len(answer) + 1 :]
        for ids in (prompt + answer, answer)
    )
    expected = math.exp((sum(alone) - sum(after)) / (len(answer) - 1))
    assert row["scores"]["ifd"][0] == pytest.approx(expected, rel=1e-4)

    between = (min(row["scores"]["ifd"]) + max(row["scores"]["ifd"])) / 2
    strict = IFDScorer(sampler, 0.0, between)
    assert ScoreFilter(template, [strict]).apply(rows) == []
    (part,) = ScoreFilter(template, [strict], drop_row_on_any_fail=False, keep_if_no_key_rounds=True).apply(rows[:1])
    assert len(part["user_data"][0][1]) == 1
    assert ScoreFilter(template, [strict], intents=["code"]).apply(rows) == rows


def test_turns_that_a_model_reaches_always_or_never_can_be_left_out(model_id):
    class Judge:
        def sample(self, prompts, params):
            return [{"sequences": [{"decoded": next(verdicts)}]} for _ in prompts]

    sampler, template = TorchSampler(model_id), Template(model_id)
    sampler.set_template(template)
    scorer = PassNScorer(sampler, Judge(), num_samples=2, minimum=0.1, sampling_params={"max_tokens": 2})
    verdicts = iter(["Yes.", "no", "yes", "yes", "no", "no", "well", "hm"])
    kept = ScoreFilter(template, [scorer]).apply([GOOD, GOOD, GOOD, GOOD])
    assert [row["scores"]["pass_n"] for row in kept] == [[0.5], [None]]


def test_turns_are_scored_by_the_share_of_their_tokens_that_the_question_makes_likelier(model_id):
    sampler, template = TorchSampler(model_id), Template(model_id)
    sampler.set_template(template)
    answer = GOOD["messages"][1]["content"]
    rows = [chat("Why does a bird fly?", answer), chat(answer, answer)]
    score_all = ScoreFilter(template, [ChrMinScorer(sampler, None)])
    scores = [row["scores"]["chr_min"][0] for row in score_all.apply(rows)]

    ids = template.tokenizer(answer, add_special_tokens=False)["input_ids"]
    prompt = template.encode({"messages": rows[0]["messages"][:1]}, add_generation_prompt=True)["input_ids"].tolist()
    params = {"max_tokens": 0, "prompt_logprobs": 0}
    after, alone = (
        sampler.sample([{"input_ids": given}], params)[0].prompt_logprobs[-len(ids) + 1 :]
        for given in (prompt + ids, ids)
    )
    gains = {
        token: min(a - b for other, a, b in zip(ids[1:], after, alone, strict=True) if other == token)
        for token in ids[1:]
    }
    assert scores[0] == sum(gain > 0 for gain in gains.values()) / len(gains)
    strict = ChrMinScorer(sampler, max(scores))
    kept = ScoreFilter(template, [strict]).apply(rows)
    assert [row["scores"]["chr_min"][0] for row in kept] == [score for score in scores if score < max(scores)]
    # Every token of the answer stands in the question.
    echoed = ScoreFilter(template, [ChrMinScorer(sampler, 0.0, exclude_prompt_echoed_ids=True)]).apply(rows[1:])
    assert [row["scores"]["chr_min"] for row in echoed] == [[None]]


def test_a_turn_said_in_the_models_own_words_is_scored_as_its_own_answer_is(model_id):
    class Rephrasing:
        def __init__(self, sampler):
            self.sampler, self.asked = sampler, []

        def sample(self, prompts, params):
            if "messages" not in prompts[0]:
                return self.sampler.sample(prompts, params)
            self.asked += [prompt["messages"][-1]["content"] for prompt in prompts]
            return [{"sequences": [{"decoded": text}]} for text in (OWN, "short")]

    OWN = "Its wings push the air down as it moves."
    template = Template(model_id)
    rephrasing = Rephrasing(TorchSampler(model_id))
    scorer = ParaphraseScorer(rephrasing, template, max_answer_tokens=8)
    kept = ScoreFilter(template, [scorer]).apply([GOOD, GOOD])
    question = GOOD["messages"][0]["content"]
    own = ScoreFilter(template, [ChrMinScorer(rephrasing, None)]).apply([chat(question, OWN)])

    assert kept[0]["scores"]["paraphrase"] == own[0]["scores"]["chr_min"] and kept[1]["scores"]["paraphrase"] == [None]
    assert all(text.startswith(question) and GOOD["messages"][1]["content"] not in text for text in rephrasing.asked)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ChrMinScorer(None, 2.0), "threshold"),
        (lambda: ParaphraseScorer(None, None, -1.0), "chr_min_threshold"),
        (lambda: ParaphraseScorer(None, None, max_answer_tokens=0), "max_answer_tokens"),
        (lambda: ScoreFilter(None, []), "scorers"),
        (lambda: ScoreFilter(None, [None], max_prompt_tokens=0), "max_prompt_tokens"),
        (lambda: IFDScorer(None, 2.0, 1.0), "minimum"),
        (lambda: PassNScorer(None, None, num_samples=0), "num_samples"),
        (lambda: PassNScorer(None, None, minimum=2.0), "minimum"),
    ],
)
def test_wrong_settings_of_scores_are_refused_by_their_name(make, field):
    with pytest.raises(InvalidInput) as refused:
        make()
    assert refused.value.field == field


THINKING = {"role": "assistant", "content": "Yes.", "reasoning_content": "Birds have wings, so yes."}
CALLED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "w", "arguments": "{}"}}]},
]


@pytest.mark.parametrize(
    ("make", "row", "reason"),
    [
        (lambda: HardFilter(min_user_chars=24), GOOD, "short question"),
        (lambda: HardFilter(min_user_chars=19), GOOD, None),
        (lambda: HardFilter(min_user_chars=24, min_user_chars_cjk=6), chat("鸟怎么飞行呢？", "拍翅膀。"), None),
        (lambda: HardFilter(min_user_chars_cjk=14), chat("鸟怎么飞行呢？", "拍翅膀。"), "short question"),
        (lambda: HardFilter(min_assistant_chars_2turn=80), chat("Do birds fly?", "Yes."), "short answer"),
        (
            lambda: HardFilter(min_assistant_chars_2turn=80),
            {"messages": [{"role": "user", "content": "Do birds fly?"}, THINKING]},
            None,
        ),
        (lambda: HardFilter(max_rounds=1), chat("a", "b", "c", "d"), "too many rounds"),
        (
            lambda: HardFilter(max_rounds=1, agent_max_rounds=2),
            {"messages": [*CALLED, {"role": "tool", "content": "sun"}, *chat("and now?", "rain")["messages"]]},
            None,
        ),
        (lambda: HardFilter(allow_incomplete_role=True), chat("x", roles=("assistant",)), None),
        (lambda: RefuseFilter(check_window=5), chat("a", "Well, dear, as an AI language model I do"), None),
        (RefuseFilter, chat("a", f"<think>{'I cannot help. ' * 40}</think>Sure, here it is."), None),
        (
            lambda: MessageSanityFilter(check_role_order=False),
            chat("a", "b", "c", roles=("user", "user", "assistant")),
            None,
        ),
        (
            MessageSanityFilter,
            {"messages": [*CALLED, {"role": "tool", "tool_call_id": "b", "content": "sun"}, THINKING]},
            "tool's answer to another call",
        ),
        (lambda: MessageSanityFilter(check_content_integrity=True), chat("", "b"), "empty message"),
        (lambda: MessageSanityFilter(check_content_integrity=True, max_msg_chars=3), chat("a", "long"), "long message"),
        (lambda: MessageSanityFilter(check_content_integrity=True, min_turns=3), GOOD, "few turns"),
        (lambda: MessageSanityFilter(extra_sensitive_words=["WINGS"]), GOOD, "sensitive word"),
        (lambda: MessageSanityFilter(["wings"], filter_sensitive=False), GOOD, None),
        (lambda: DeadLoopFilter(cascade_threshold=3), chat("a", "Wait. Hmm. Actually, no."), "doubts again and again"),
        (lambda: DeadLoopFilter(cascade_threshold=3), chat("a", "<think>Wait. Hmm. Actually, no.</think>Yes."), None),
        (
            lambda: DeadLoopFilter(think_hesitation_density_threshold=5.0),
            chat("a", "<think>Wait, hmm.</think>Yes."),
            "doubts again and again",
        ),
        (
            lambda: DeadLoopFilter(repetition_threshold=0.45, ngram_size=2, ngram_min_words=4),
            chat("a", "so it is so it is so it is"),
            "the same words again and again",
        ),
        (TokenSoupFilter, chat("a", "a\ufffd\ufffdb"), "could not be decoded"),
        (TokenSoupFilter, chat("a", "a\x00b"), "control characters"),
        (TokenSoupFilter, chat("a", "\ue000ab"), "characters for private use"),
        (lambda: TokenSoupFilter(special_token_count=2), chat("a", "<|im_end|> [PAD]"), "tokens of a model"),
        (
            lambda: TokenSoupFilter(script_chaos_min_chars=4),
            chat("a", "a б c д e ж"),
            "scripts change again and again",
        ),
        (lambda: TokenSoupFilter(max_chars=1), chat("a", "a\x00b"), None),
        (TokenSoupFilter, chat("a", "用 Python 写 code，很好 with numpy 和 torch 的 例子。"), None),
        (lambda: SpecialCharsFilter(0.1), chat("a", "| a | b |\n" * 9), "signs for the most part"),
        (lambda: SpecialCharsFilter(0.1, role="user"), chat("a", "| a | b |\n" * 9), None),
        (lambda: TokenNumFilter(len, 1, 4, role="user"), chat("four", "a long answer"), None),
        (lambda: TokenNumFilter(count=len, max_num=20), GOOD, "too long"),
    ],
)
def test_settings_of_both_generations_decide(make, row, reason):
    quality = make()

    kept = quality.apply([row])

    assert (len(kept), list(quality.dropped)) == ((1, []) if reason is None else (0, [reason]))


@pytest.mark.parametrize(
    ("make", "said", "mended"),
    [
        (FixUnicodeFilter, "\ufb01", "\ufb01"),
        (lambda: FixUnicodeFilter("NFKC"), "\ufb01", "fi"),
        (lambda: FixUnicodeFilter("NFKC", role="user"), "\ufb01", "\ufb01"),
        (lambda: RemoveRepeatSentencesFilter(min_characters=2), "So it is. so it is.", "So it is. so it is."),
        (lambda: RemoveRepeatSentencesFilter(True, min_characters=2), "So it is. so it is.", "So it is."),
        (lambda: RemoveRepeatSentencesFilter(False, True, min_characters=2), "So, it is. So it is!", "So, it is."),
    ],
)
def test_settings_of_both_generations_mend(make, said, mended):
    (row,) = make().apply([chat("x", said)])

    assert row["messages"][1]["content"] == mended


def test_what_was_seen_is_kept_in_a_file_for_the_next_process(tmp_path):
    file = tmp_path / "seen.json"
    alike = chat("How does a bird fly?", "It beats its wings; otherwise it would fall.")

    first = DedupFilter(max_per_sig=2, prefix_chars=10, asst_chars=10, state_file=str(file)).apply([GOOD])
    second = DedupFilter(max_per_sig=2, prefix_chars=10, asst_chars=10, state_file=str(file)).apply([alike, alike])

    assert (first, second) == ([GOOD], [alike])


def test_words_of_a_file_are_sensitive(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("# birds\n\nwings\n")

    assert QualityPreprocessor(sensitive_words_file=words, token_num_min=1).apply([GOOD]) == []
    with pytest.raises(InvalidInput, match="cannot be read"):
        MessageSanityFilter(sensitive_words_file=tmp_path / "none.txt")


def test_calls_in_texts_are_brought_into_their_field_where_asked_for():
    text = '<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>'

    (left,) = MessageNormalizer().apply([chat("x", text)])
    (made,) = MessageNormalizer(normalize_tool_calls=True).apply([chat("x", text)])

    assert "tool_calls" not in left["messages"][1]
    assert made["messages"][1]["tool_calls"][0]["function"]["name"] == "w"


def test_detectors_name_turns_and_those_train():
    class Numbers:
        intent = "numbers"

        def __call__(self, messages):
            return [i for i, each in enumerate(messages) if each["role"] == "assistant" and each["content"].isdigit()]

    row = {**chat("How many?", "7", "Why?", "So it is."), "user_data": [("key_rounds", [3]), ("id", 5)]}

    (named,) = IntentClassifier(detectors=[Numbers()], intent_field="kind").apply([row])
    (other,) = IntentClassifier(detectors=[Numbers()]).apply([chat("Why?", "So it is.")])

    assert (named["kind"], named["user_data"]) == ("numbers", [("id", 5), ("key_rounds", [1])])
    assert (other["intent"], "user_data" in other) == ("chat", False)


def test_a_models_tokenizer_counts(model_id):
    ids = Template(model_id).tokenizer(GOOD["messages"][1]["content"], add_special_tokens=False)["input_ids"]

    assert TokenNumFilter(str(model_id), 1, len(ids), role="assistant").apply([GOOD]) == [GOOD]
    assert TokenNumFilter(str(model_id), 1, len(ids) - 1, role="assistant").apply([GOOD]) == []
