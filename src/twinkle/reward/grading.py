"""Whether two formulas are equal: at once where it shows, else judged in a process of its own, within bounds."""

from __future__ import annotations

import math
import re
import threading
from functools import lru_cache
from importlib.util import find_spec

from twinkle.core.process.events import event_log
from twinkle.core.process.question_process import QuestionProcess

DEFAULT_SECONDS = 5.0
_PROCESS = "twinkle.reward.grader_process"
MAX_CHARACTERS = 1000
"""Of a formula that is understood; a longer one is equal to itself only."""
TOLERANCE = 1e-6
PLAIN_NUMBER = re.compile(r"[-+]?\d{1,300}(?:\.\d{1,300})?", re.ASCII)
GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
SPACES = re.compile(r"\\[,;!: ]|\\(?:left|right|quad|qquad)\b|[\s$]+")

log = event_log()


class FormulaGrader:
    """Compares formulas in LaTeX by ``math-verify``. Its process starts with the first pair that needs it.

    Args:
        seconds: How long a comparison may take. One that takes longer counts as unequal, and its process is ended.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: QuestionProcess | None = None
        self._can_understand = find_spec("math_verify") is not None
        if not self._can_understand:
            log.warning(
                "reward.formulas_not_understood", reason="math-verify is missing: pip install 'twinkle-queue[scripts]'"
            )

    def are_equal(self, gold: str, answer: str) -> bool:
        """Whether the answer is the gold one, in whatever way it is written."""
        if compact(gold) == compact(answer):
            return bool(compact(gold))
        numbers = [float(text) if PLAIN_NUMBER.fullmatch(text) else None for text in (compact(gold), compact(answer))]
        if None not in numbers:
            return math.isclose(*[number for number in numbers if number is not None], rel_tol=TOLERANCE)
        if not self._can_understand or max(len(gold), len(answer)) > MAX_CHARACTERS:
            return False
        return self._ask(gold, answer)

    def _ask(self, gold: str, answer: str) -> bool:
        with self._lock:
            if self._process is None or not self._process.is_running:
                self._process = QuestionProcess(_PROCESS)
            process = self._process
            equal = process.ask([gold, answer], self._seconds)
            if equal is None:
                # It hangs, or has died of what it was asked.
                process.end()
                self._process = None
                log.warning("reward.formula_given_up", seconds=self._seconds, characters=len(answer))
            return bool(equal)

    def close(self) -> None:
        """End the process; the next pair that needs one starts another."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None


@lru_cache(maxsize=1024)
def compact(formula: str) -> str:
    """A formula without what changes nothing: spaces, dollars, sizes of brackets and fractions, groups of digits."""
    text = SPACES.sub("", formula).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    return text.replace(",", "") if GROUPED_NUMBER.fullmatch(text) else text
