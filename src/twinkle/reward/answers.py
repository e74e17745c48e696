r"""Where in a text the answer stands. All of it takes time in proportion to the text, whatever a model wrote.

Nothing here backtracks: a completion of a hundred thousand opening tags is judged as quickly as any other.
"""

from __future__ import annotations

import re

BOXED = re.compile(r"\\[{}\\]|\\boxed\s*\{|\{|\}")
HASHES = "####"
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
MAX_DIGITS = 400
"""Of a number that is read: more are no answer."""


def boxed_answers(text: str) -> list[str]:
    r"""What stands in each ``\boxed{...}`` that is closed, braces within it counted, in the order of their ends."""
    found = []
    starts: list[int | None] = []  # of what is open: the content's start for a box, none for a brace
    for match in BOXED.finditer(text):
        token = match.group()
        if token == "}":
            start = starts.pop() if starts else None
            if start is not None:
                found.append(text[start : match.start()].strip())
        elif token == "{":
            starts.append(None)
        elif token.startswith("\\boxed"):
            starts.append(match.end())
    return found


def hashed_answer(text: str) -> str | None:
    """What follows the last ``####`` on its line."""
    start = text.rfind(HASHES)
    return None if start < 0 else text[start + len(HASHES) :].partition("\n")[0].strip()


def tagged(text: str, tag: str) -> str | None:
    """What stands between the first ``<tag>`` and the ``</tag>`` after it."""
    start = text.find(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    end = text.find(f"</{tag}>", start)
    return None if end < 0 else text[start:end].strip()


def number_of(text: str) -> float | None:
    """The last number in a text, digits in groups of three or not; none in a text that is too long for one."""
    if len(text) > MAX_DIGITS:
        return None
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def split_at_commas(text: str) -> list[str]:
    """The parts between commas that are in no bracket."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character in ",，" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
