"""Indentation comes back to a text that lost it, after another that is nearly the same."""

from __future__ import annotations

import ast
import textwrap

import pytest

from harness.indentation import restore

LOOP = textwrap.dedent('''\
    import os


    def train(rows, limit=3):
        """Go over the rows.

        One by one.
        """
        seen = 0
        for row in rows:
            # Nothing of these.
            if row is None:
                continue
            elif row < 0:
                break
            try:
                total = compute(
                    row,
                    options={
                        'deep': True,
                    },
                )
            except ValueError:
                return None
            seen += 1
            if seen % limit == 0:
                print(f'seen {seen}: {total}')
        else:
            print('all')
        report(seen)


    if __name__ == '__main__':
        train([])
    ''')


def without_indentation(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line]


def is_same(restored: list[str], text: str) -> bool:
    """The same lines, and the same program but for spaces inside long strings, which nobody can know."""
    assert without_indentation("\n".join(restored)) == without_indentation(text)
    return _program("\n".join(restored)) == _program(text)


def _program(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return ast.dump(tree)


def test_a_text_gets_back_the_indentation_of_its_twin() -> None:
    assert is_same(restore(without_indentation(LOOP), [LOOP.splitlines()]), LOOP)


def test_the_most_similar_text_is_followed() -> None:
    other = "def train():\n    for row in ():\n        pass\n".splitlines()

    assert is_same(restore(without_indentation(LOOP), [other, LOOP.splitlines()]), LOOP)


def test_other_words_and_lines_that_only_one_has_do_not_matter() -> None:
    ours = LOOP.replace("compute(", "work_out(").replace("limit=3", "limit=20").replace("            seen += 1\n", "")
    ours = ours.replace("        report(seen)\n", "        report(seen, limit)\n        close()\n")

    assert is_same(restore(without_indentation(ours), [LOOP.splitlines()]), ours)


def test_a_block_that_only_one_has_holds_the_statement_after_it() -> None:
    model = "def f(rows):\n    for row in rows:\n        one(row)\n        two(row)\n    three(rows)\n"
    ours = (
        "def f(rows):\n    while queue.is_open():\n        for row in rows:\n            one(row)\n"
        "            two(row)\n    three(rows)\n"
    )

    assert is_same(restore(without_indentation(ours), [model.splitlines()]), ours)


def test_without_a_text_that_is_like_it_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        restore(["def f():", "x = 1 +"], [])
