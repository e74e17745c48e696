"""The process that compares formulas: asked ``[gold, answer]``, it answers ``true`` or ``false``."""

from __future__ import annotations

import logging
from typing import Any

from twinkle.core.process.question_process import answer_questions


def main() -> None:
    """Answer until there is nothing more to read."""
    logging.disable(logging.CRITICAL)
    # Heavy, and wanted in this process alone.
    from math_verify import parse, verify  # noqa: PLC0415

    def is_equal(question: Any) -> bool:
        try:
            # Its own limits need signals of a main thread, and seconds; ours is kept from outside.
            expected, given = (parse(f"${text}$", parsing_timeout=None) for text in question)
            return bool(verify(expected, given, timeout_seconds=None))
        except Exception:  # noqa: BLE001 - whatever the libraries make of it, such a formula equals nothing
            return False

    answer_questions(is_equal)


if __name__ == "__main__":
    main()
