"""Gives a Python text without leading spaces its indentation back, after another text that is nearly the same.

Where the block ends that an ``if`` opened cannot be told from the lines alone; another print of the script knows it.
Of a line that only this text has, Python's own rules say most: after a colon it goes deeper, after a ``return`` it does
not go on, ``else`` stands where its ``if`` stands.
"""

from __future__ import annotations

import difflib
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

STEP = 4
_FOLLOWERS = {"else": ("if", "for", "while", "try", "elif", "except"), "elif": ("if", "elif")}
_FOLLOWERS |= {"except": ("try", "except"), "finally": ("try", "except", "else")}
_ENDS = frozenset({"return", "break", "continue", "raise"})
_NO_STATEMENT = (tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_STRINGS = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class Statement:
    """One logical line: a statement, with the comments and empty lines before it."""

    before: tuple[str, ...]
    lines: tuple[str, ...]
    level: int

    @property
    def first_word(self) -> str:
        return re.match(r"\w*", self.lines[0].strip()).group()  # type: ignore[union-attr]

    @property
    def opens(self) -> bool:
        return _without_comment(self.lines[-1]).endswith(":")

    @property
    def key(self) -> str:
        """What it is compared by: without strings, comments and spaces."""
        joined = " ".join(_without_comment(line.strip()) for line in self.lines)
        return re.sub(r"\s+", "", _STRINGS.sub("''", joined))


def restore(lines: Sequence[str], models: Sequence[Sequence[str]]) -> list[str]:
    """The same lines with leading spaces.

    Args:
        lines: Python without indentation.
        models: Indented texts; the most similar one is followed.

    Raises:
        SyntaxError: What comes out is no Python: there is no model like it.
    """
    flat = statements_of(lines)
    keys = [statement.key for statement in flat]
    candidates = [statements_of(model) for model in models]
    model = max(candidates, key=lambda model: _similarity(keys, [statement.key for statement in model]), default=[])
    levels = _levels(flat, model, _pairs(keys, [statement.key for statement in model]))
    restored = []
    for statement, level in zip(flat, levels, strict=True):
        restored += [" " * STEP * level + line.strip() if line.strip() else "" for line in statement.before]
        first, *rest = statement.lines
        restored.append(" " * STEP * level + first.strip())
        restored += rest if _holds_long_string(statement) else [_continued(line, level) for line in rest]
    compile("\n".join(restored) + "\n", "<restored>", "exec")
    return restored


def statements_of(lines: Sequence[str]) -> list[Statement]:
    """Logical lines with their level; of a text without indentation all are at level 0."""
    statements: list[Statement] = []
    pending: list[str] = []
    start: int | None = None
    text = "\n".join(line.strip() for line in lines) + "\n"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row = token.start[0] - 1
        if start is None and token.type == tokenize.NL:
            pending.append(lines[row])
        elif token.type == tokenize.NEWLINE and start is not None:
            level = (len(lines[start]) - len(lines[start].lstrip())) // STEP
            statements.append(Statement(tuple(pending), tuple(lines[start : row + 1]), level))
            pending, start = [], None
        elif start is None and token.type not in _NO_STATEMENT:
            start = row
    return statements


def _levels(flat: list[Statement], model: list[Statement], pairs: dict[int, int]) -> list[int]:
    """Of each statement: what Python demands, else what the model shows, else what the one before has.

    A block that only this text has holds the one statement that follows, with all that this holds itself.
    """
    levels: list[int] = []
    openers: list[Statement] = []
    deeper: list[tuple[int, int]] = []
    """The statements that such blocks hold: number, and level in the model."""
    for number, statement in enumerate(flat):
        shown = model[pairs[number]].level if number in pairs else None
        if shown is not None:
            deeper = [(held, level) for held, level in deeper if held == number or shown > level]
        wanted = None if shown is None else shown + len(deeper)
        level = _level(statement, flat[number - 1] if number else None, levels, openers, wanted)
        if statement.opens and shown is None and number + 1 in pairs:
            deeper.append((number + 1, model[pairs[number + 1]].level))
        levels.append(level)
        openers[level:] = [statement]
    return levels


def _level(
    statement: Statement, previous: Statement | None, levels: list[int], openers: list[Statement], wanted: int | None
) -> int:
    if previous is None:
        return 0
    last = levels[-1]
    if previous.opens:
        return last + 1
    most = last - 1 if previous.first_word in _ENDS else last
    if statement.first_word in _FOLLOWERS:
        owners = _FOLLOWERS[statement.first_word]
        fitting = [level for level in range(most + 1) if openers[level].first_word in owners]
        return wanted if wanted in fitting else fitting[-1]
    return max(0, most if wanted is None else min(wanted, most))


def _pairs(keys: list[str], model_keys: list[str]) -> dict[int, int]:
    """Which statement of the model each one is: equal ones, and between these such as are alike."""
    pairs: dict[int, int] = {}
    for kind, start, end, model_start, model_end in difflib.SequenceMatcher(
        None, keys, model_keys, autojunk=False
    ).get_opcodes():
        if kind == "equal":
            pairs.update(zip(range(start, end), range(model_start, model_end), strict=True))
        elif kind == "replace":
            free = list(range(model_start, model_end))
            for number in range(start, end):
                like = [other for other in free if _alike(keys[number], model_keys[other])]
                if like:
                    pairs[number] = like[0]
                    free = [other for other in free if other > like[0]]
    return pairs


def _alike(one: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio() > 0.7


def _similarity(one: list[str], other: list[str]) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def _without_comment(line: str) -> str:
    return re.sub(r"\s+#.*$", "", line.rstrip())


def _continued(line: str, level: int) -> str:
    return " " * STEP * (level if line[:1] in ")]}" else level + 1) + line


def _holds_long_string(statement: Statement) -> bool:
    return any(mark in line for line in statement.lines for mark in ('"""', "'''"))
