"""Texts with places to fill in: paths of names and numbers, one pass, and nothing that runs."""

from __future__ import annotations

import time

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.core.placeholders import PlaceMissing, read_placeholders

ROOTS = frozenset({"sample", "item"})


def fill(text: str, **values: object) -> str:
    return read_placeholders(text, field="input", roots=ROOTS).fill(values)


def test_places_are_filled_with_what_their_paths_lead_to() -> None:
    item = {"answer": 7, "rows": [{"a-b": "x"}, "second"], "flag": True, "none": None, "more": {"1": [1.5]}}

    assert fill("= {{item.answer}}", item=item) == "= 7"
    assert fill("{{ item.rows[0].a-b }}{{item.rows[1]}}{{ item.rows.1 }}", item=item) == "xsecondsecond"
    assert fill("{{item.flag}} {{item.none}} {{item.more}}", item=item) == 'true null {"1": [1.5]}'
    assert fill("no place {at} all }}", item=item) == "no place {at} all }}"


def test_a_value_with_braces_is_not_filled_in_once_more() -> None:
    sample = {"output_text": "{{item.answer}}"}

    assert fill("{{sample.output_text}}", sample=sample, item={"answer": "secret"}) == "{{item.answer}}"


@pytest.mark.parametrize(
    "text",
    [
        "{{item.answer",
        "{{}}",
        "{{item.}}",
        "{{item..answer}}",
        "{{item['answer']}}",
        "{{item.answer|upper}}",
        "{{item.answer()}}",
        "{{ {{item.answer}} }}",
        "{% for x in item %}{{x}}{% endfor %}",
        "{{other.answer}}",
        "{{7}}",
        "{{item." + "a" * 300 + "}}",
        "{{item.a}}" * 101,
        "a" * 65_537,
    ],
)
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        read_placeholders(text, field="input", roots=ROOTS)


@pytest.mark.parametrize("path", ["item.other", "item.rows[9]", "item.__class__", "item.text.length", "item.text[0]"])
def test_a_path_that_leads_nowhere_says_which(path: str) -> None:
    with pytest.raises(PlaceMissing, match=path.replace("[", r"\[").replace("]", r"\]")):
        fill("{{" + path + "}}", item={"rows": [1], "text": "abc"})


def test_filling_stops_when_the_text_gets_too_long() -> None:
    started = time.monotonic()
    with pytest.raises(PlaceMissing, match="more than"):
        fill("{{item.a}}" * 100, item={"a": "x" * 1_000_000})
    with pytest.raises(InvalidInput):
        read_placeholders("{{" * 30_000, field="input", roots=ROOTS)
    assert time.monotonic() - started < 1
