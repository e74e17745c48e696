"""Whether two formulas are equal: at once where it shows, else judged in a process of its own, within bounds."""

from __future__ import annotations

import json
import math
import queue
import re
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import IO

from twinkle.core.events import event_log

DEFAULT_SECONDS = 5.0
START_SECONDS = 60.0
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
        self._process: _GraderProcess | None = None
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
                self._process = _GraderProcess()
            process = self._process
            equal = process.ask(gold, answer, self._seconds)
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


class _GraderProcess:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "twinkle.reward.grader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions = self._process.stdin
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # A pipe is not read with a time limit everywhere, a queue is.
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), name="formula-answers", daemon=True
        ).start()
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._is_ready = False

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, gold: str, answer: str, seconds: float) -> bool | None:
        """The process's word; none if it gives none in time. What starting takes does not count."""
        if not self._is_ready:
            self._is_ready = self._answer(START_SECONDS) is not None
            if not self._is_ready:
                self.end()
                raise RuntimeError(f"the process that compares formulas did not start within {START_SECONDS:.0f} s")
        try:
            self._questions.write(f"{json.dumps([gold, answer])}\n")
            self._questions.flush()
        except OSError:
            return None
        return self._answer(seconds)

    def _answer(self, seconds: float) -> bool | None:
        deadline = time.monotonic() + seconds
        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        return None if line is None else bool(json.loads(line))

    def end(self) -> None:
        """End it at once."""
        self._finalizer()


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # what was not read any more
                stream.close()


@lru_cache(maxsize=1024)
def compact(formula: str) -> str:
    """A formula without what changes nothing: spaces, dollars, sizes of brackets and fractions, groups of digits."""
    text = SPACES.sub("", formula).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    return text.replace(",", "") if GROUPED_NUMBER.fullmatch(text) else text
