"""Files of JSON lines, looked at piece by piece."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from twinkle.wire.jsonl import MAX_LINE_BYTES, BatchCheck, LineProblem, ObjectCheck, lines_of, read_object

CHAT = "/v1/chat/completions"


def _request(custom_id: object = "a", **changes: object) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}, **changes}
    return json.dumps(line).encode()


def _check(*lines: bytes, max_lines: int = 10) -> tuple[list[str], list[LineProblem]]:
    check = BatchCheck(CHAT, max_lines=max_lines)
    found = [check.look_at(line) for line in lines_of([b"\n".join(lines)])]
    return [line.custom_id for line in found if line is not None], check.finish().problems


@given(st.lists(st.binary(max_size=12)), st.integers(1, 7))
def test_lines_are_the_same_however_the_file_is_cut(lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    assume(not data.startswith(b"\xef\xbb\xbf"))

    found = list(lines_of(data[at : at + size] for at in range(0, len(data), size)))

    bare = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    assert [(line.number, line.data) for line in found] == [(n, line) for n, line in enumerate(bare, 1) if line.strip()]
    assert all(data[line.start :].startswith(line.data) for line in found)


@pytest.mark.parametrize(
    ("data", "column", "words"),
    [
        (b'{"a": }', 7, "is no JSON: Expecting value"),
        (b'{"\xc3\xa9": "x" "y"}', 11, "is no JSON: Expecting ',' delimiter"),
        (b'{"a": NaN}', 7, "NaN is not a number of JSON"),
        (b'{"\xc3\xa9": "\xff"}', 8, "holds bytes that are no UTF-8"),
        (b"[1]", 1, "is a list; each line must be an object"),
        (b"null", 1, "is null; each line must be an object"),
    ],
)
def test_what_is_no_object_is_told_by_line_and_column(data: bytes, column: int, words: str) -> None:
    (line,) = lines_of([b"\n\n", data])

    problem = read_object(line)

    assert isinstance(problem, LineProblem)
    assert (problem.line, problem.column) == (3, column)
    assert words in problem.message
    assert str(problem).startswith(f"line 3, column {column}: ")


def test_a_line_without_end_is_wrong_and_not_kept_in_memory() -> None:
    pieces = [b"x" * 2**20] * (2 * MAX_LINE_BYTES // 2**20)

    first, second = lines_of([*pieces, b'\n{"a": 1}'])

    assert isinstance(read_object(first), LineProblem)
    assert len(first.data) == MAX_LINE_BYTES + 1
    assert (second.number, second.start) == (2, 2 * MAX_LINE_BYTES + 1)
    assert read_object(second) == {"a": 1}


def test_all_wrong_lines_are_counted_and_the_first_hundred_told() -> None:
    check = ObjectCheck()

    check.feed(b"{}\n" + b"wrong\n" * 150)
    check.feed(b'{"a":')
    check.feed(b" 1}")
    found = check.finish()

    assert (found.num_lines, found.num_wrong) == (152, 150)
    assert [problem.line for problem in found.problems] == list(range(2, 102))


def test_a_batch_s_lines_are_what_openai_wants_of_them() -> None:
    ids, problems = _check(
        _request("a"),
        _request("b"),
        _request("a"),
        _request(7),
        _request("c", method="GET"),
        _request("d", url="/v1/completions"),
        _request("e", body=None),
        b"{",
    )

    assert ids == ["a", "b"]
    assert [(problem.line, problem.param, problem.code) for problem in problems] == [
        (3, "custom_id", "duplicate_custom_id"),
        (4, "custom_id", "invalid_custom_id"),
        (5, "method", "invalid_method"),
        (6, "url", "invalid_url"),
        (7, "body", "missing_required_parameter"),
        (8, None, "invalid_json"),
    ]
    assert problems[1].column == 2
    assert problems[2].column == len('{"custom_id": "c", ') + 1


def test_a_batch_may_be_neither_empty_nor_too_long() -> None:
    ids, problems = _check(*(_request(str(number)) for number in range(12)), max_lines=10)

    assert len(ids) == 12
    assert [(problem.line, problem.code) for problem in problems] == [(11, "too_many_lines")]
    assert [problem.code for problem in _check(b"", b" ")[1]] == ["empty_file"]
