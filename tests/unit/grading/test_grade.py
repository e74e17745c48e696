"""Graders on answers: every kind, what fails in them, and that a score always comes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.grading.grade import (
    Answer,
    Grade,
    GraderFailed,
    Judgement,
    ProblemKind,
    RewardRequest,
    grade,
)
from twinkle.wire.bodies.graders import GraderRunRequest, JudgeSampling, item_fields
from twinkle.wire.bodies.jobs_base import parse_part

CHECK = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "tiny",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Rate: {{sample.output_text}}"}]}],
}
LABELS = {**JUDGE, "type": "label_model", "labels": ["good", "not good"], "passing_labels": ["good"]}


class FixedJudges:
    """Answers always the same, and remembers what it was asked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[Sequence[Mapping[str, str]]] = []

    async def ask(
        self, model: str, messages: Sequence[Mapping[str, str]], sampling: JudgeSampling, *, grader: str
    ) -> Judgement:
        self.asked.append(messages)
        return Judgement(self.text, 10)


class SlowRewards:
    async def grade(self, request: RewardRequest) -> float:
        raise GraderFailed(ProblemKind.TIMEOUT, "took more than 1 s")


def read(grader: Mapping[str, object]) -> GraderRunRequest:
    return parse_part(GraderRunRequest, json.dumps({"grader": grader, "model_sample": ""}).encode())


async def graded(grader: Mapping[str, object], text: str, judges: FixedJudges | None = None, **item: object) -> Grade:
    return await grade(read(grader).grader, Answer(text, item), judges or FixedJudges(""), SlowRewards())


@pytest.mark.parametrize(
    ("operation", "text", "score"),
    [("eq", "7", 1), ("eq", "7 ", 0), ("ne", "8", 1), ("like", "It is 7.", 1), ("like", "x", 0), ("ilike", "7", 1)],
)
async def test_a_string_check_compares_with_the_rows_field(operation: str, text: str, score: float) -> None:
    found = await graded({**CHECK, "operation": operation}, text, answer=7)

    assert (found.score, found.problems) == (score, ())


async def test_case_counts_for_like_and_not_for_ilike() -> None:
    assert (await graded({**CHECK, "operation": "like"}, "So: YES", answer="yes")).score == 0
    assert (await graded({**CHECK, "operation": "ilike"}, "So: YES", answer="yes")).score == 1


async def test_an_answer_in_json_can_be_looked_into() -> None:
    grader = {**CHECK, "input": "{{sample.output_json.result[0].value}}"}

    assert (await graded(grader, '{"result": [{"value": "7"}]}', answer="7")).score == 1
    broken = await graded(grader, "{result", answer="7")
    assert broken.score == 0
    assert [problem.kind for problem in broken.problems] == [ProblemKind.SAMPLE]


async def test_a_row_without_the_field_scores_nothing_and_says_so() -> None:
    found = await graded(CHECK, "7")

    assert found.score == 0
    assert [(problem.kind, problem.message) for problem in found.problems] == [
        (ProblemKind.VARIABLE, "there is no item.answer")
    ]


async def test_a_formula_makes_one_number_of_several_graders() -> None:
    similar = {
        "type": "text_similarity",
        "name": "similar",
        "evaluation_metric": "fuzzy_match",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
    }
    parts = {"exact": CHECK, "similar": similar}
    multi = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "0.5 * exact + 0.5 * similar^2"}

    found = await graded(multi, "abcd", answer="abxy")

    assert found.scores == {"exact": 0.0, "similar": 0.5}
    assert found.score == pytest.approx(0.125)
    assert item_fields(read(multi).grader) == {"answer"}
    listed = {**multi, "graders": [CHECK, similar]}
    assert (await graded(listed, "abcd", answer="abxy")).score == found.score
    alone = {**multi, "graders": CHECK, "calculate_output": "2 * exact"}
    assert (await graded(alone, "7", answer="7")).score == 2


async def test_a_part_that_fails_counts_as_zero_and_the_others_still_count() -> None:
    parts = {"exact": CHECK, "slow": {"type": "regexp", "name": "slow", "pattern": "(a+)+$"}}
    multi = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "exact + slow"}

    found = await graded(multi, "7", answer="7")

    assert found.score == 1
    assert [(problem.grader, problem.kind) for problem in found.problems] == [("slow", ProblemKind.TIMEOUT)]


async def test_a_formula_without_a_value_scores_nothing_and_says_so() -> None:
    multi = {"type": "multi", "name": "m", "graders": {"exact": CHECK}, "calculate_output": "1 / exact"}

    found = await graded(multi, "8", answer="7")

    assert found.score == 0
    assert [problem.kind for problem in found.problems] == [ProblemKind.FORMULA]


@pytest.mark.parametrize(
    ("judgement", "score"),
    [
        ("0.75", 0.75),
        ('{"steps": [], "result": 0.5}', 0.5),
        ('{"score": "0.25"}', 0.25),
        ("Of 10 points it gets 7, so the score is 0.7", 0.7),
        (".5", 0.5),
    ],
)
async def test_a_model_s_number_is_the_score(judgement: str, score: float) -> None:
    judges = FixedJudges(judgement)

    found = await graded(JUDGE, "an answer", judges)

    assert (found.score, found.judge_tokens) == (score, {"tiny": 10})
    assert judges.asked == [[{"role": "user", "content": "Rate: an answer"}]]


@pytest.mark.parametrize("judgement", ["", "excellent", "7", "-1", "true", '{"result": null}', "[" * 100_000])
async def test_a_judgement_without_a_number_in_range_scores_nothing_and_says_so(judgement: str) -> None:
    found = await graded(JUDGE, "x", FixedJudges(judgement))

    assert found.score == 0
    assert [problem.kind for problem in found.problems] == [ProblemKind.JUDGE_ANSWER]


@pytest.mark.parametrize(
    ("judgement", "score"),
    [("good", 1), (" Good. ", 1), ("not good", 0), ("It seems not good to me", 0), ('{"label": "good"}', 1)],
)
async def test_a_label_that_passes_scores_one(judgement: str, score: float) -> None:
    found = await graded(LABELS, "x", FixedJudges(judgement))

    assert (found.score, found.problems) == (score, ())


@pytest.mark.parametrize(
    ("grader", "field", "words"),
    [
        ({"type": "python", "name": "p", "source": "def grade(s, i): return 1"}, "grader", "never code"),
        ({**CHECK, "type": "exact_match"}, "grader", "string_check"),
        ({**CHECK, "refrence": "x"}, "grader.string_check.refrence", "did you mean reference?"),
        ({**CHECK, "input": "{{sample.text}}"}, "grader.string_check.input", "output_text"),
        ({**CHECK, "input": "{{item}}"}, "grader.string_check.input", "name a field"),
        ({**CHECK, "input": "{{item.a|upper}}"}, "grader.string_check.input", "a path like"),
        ({**JUDGE, "range": [1, 0]}, "grader.score_model", "smaller one first"),
        ({**JUDGE, "sampling_params": {"reasoning_effort": "high"}}, "", "not known here"),
        (
            {**JUDGE, "input": [{"role": "user", "content": {"type": "input_image", "image_url": "x"}}]},
            "",
            "texts only",
        ),
        ({**LABELS, "passing_labels": ["great"]}, "grader.label_model", "none of the labels"),
        ({"type": "reward", "name": "r", "reward": "math"}, "grader.reward", "compares with a truth"),
        ({"type": "regexp", "name": "r", "pattern": "("}, "grader.regexp.pattern", "no regular expression"),
        ({"type": "regexp", "name": "r", "pattern": "a", "group": 1}, "grader.regexp", "the pattern has 0"),
        ({"type": "regexp", "name": "r", "pattern": "a" * 1001}, "grader.regexp.pattern", "at most 1000"),
        (
            {"type": "multi", "name": "m", "graders": {"a": {"type": "python"}}, "calculate_output": "a"},
            "grader.multi.graders.a",
            "never code",
        ),
        (
            {"type": "multi", "name": "m", "graders": {"a b": CHECK}, "calculate_output": "1"},
            "grader.multi",
            "cannot stand in a formula",
        ),
        (
            {"type": "multi", "name": "m", "graders": {"a": CHECK}, "calculate_output": "a + __import__('os')"},
            "grader.multi",
            "calculate_output: ",
        ),
        (
            {"type": "multi", "name": "m", "graders": [CHECK, CHECK], "calculate_output": "exact"},
            "grader.multi.graders",
            "a name of its own",
        ),
        (
            {
                "type": "multi",
                "name": "m",
                "graders": {"m": {"type": "multi", "name": "m", "graders": {"a": CHECK}, "calculate_output": "a"}},
                "calculate_output": "m",
            },
            "",
            "string_check",
        ),
    ],
)
def test_a_grader_that_cannot_be_run_is_refused_with_its_place(
    grader: Mapping[str, object], field: str, words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(grader)
    assert refused.value.field.startswith(field)
    assert words in refused.value.message


def test_patterns_and_nests_made_to_be_large_are_judged_at_once() -> None:
    started = time.monotonic()
    for pattern in ("(?:" * 300 + "a" + ")" * 300, "((a{1,9999}){1,9999}){1,9999}", "a{99999999999}", "[" * 1000):
        try:
            read({"type": "regexp", "name": "r", "pattern": pattern})
        except InvalidInput:
            continue
    assert time.monotonic() - started < 2
