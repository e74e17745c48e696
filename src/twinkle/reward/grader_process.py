"""The process that compares formulas: reads ``[gold, answer]`` as a line of JSON, answers ``true`` or ``false``.

What it is asked comes from a model, which may have written anything: towers of powers, sums to infinity. So it has
little memory of its own to spend, and whoever asks ends it when an answer takes too long.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TextIO

MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answer until there is nothing more to read."""
    # Libraries print; what they print is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    logging.disable(logging.CRITICAL)
    _bound_memory()
    # Heavy, and wanted in this process alone.
    from math_verify import parse, verify  # noqa: PLC0415

    def is_equal(gold: str, answer: str) -> bool:
        # Its own limits need signals of a main thread, and seconds; ours is kept from outside.
        expected, given = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
        return bool(verify(expected, given, timeout_seconds=None))

    _tell(answers, True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            equal = is_equal(gold, answer)
        except Exception:  # noqa: BLE001 - whatever the libraries make of it, such a formula equals nothing
            equal = False
        _tell(answers, equal)


def _tell(answers: TextIO, value: bool) -> None:
    answers.write(f"{json.dumps(value)}\n")
    answers.flush()


def _bound_memory() -> None:
    if sys.platform != "win32":
        # Windows has none of it.
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    main()
