"""A process that is asked one question at a time and ended when an answer takes too long: both of its sides.

What it is asked comes from a model or from a tenant, who may have written anything: towers of powers, sums to
infinity, patterns that search for ever. So it has little memory and little time of its own to spend, and whoever asks
ends it with all that it has started.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, TextIO

START_SECONDS = 60.0
MEMORY_BYTES = 2 << 30
CPU_SECONDS = 60
"""For one question, should nobody be there any more to end it."""


class QuestionProcess:
    """Asks. What starting takes does not count; for one thread at a time.

    Args:
        module: What is run: its ``main`` calls :func:`answer_questions`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            # A group of its own, so that what it has started ends with it.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions = self._process.stdin
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # A pipe is not read with a time limit everywhere, a queue is.
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), name="question-answers", daemon=True
        ).start()
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._is_ready = False

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, question: object, seconds: float) -> Any:
        """Its answer; ``None`` if it gives none in time, or has died of the question.

        Raises:
            RuntimeError: It did not start.
        """
        if not self._is_ready:
            self._is_ready = self._answer(START_SECONDS) is not None
            if not self._is_ready:
                self.end()
                raise RuntimeError(f"{self._module} did not start within {START_SECONDS:.0f} s")
        try:
            self._questions.write(f"{json.dumps(question)}\n")
            self._questions.flush()
        except OSError:
            return None
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        return None if line is None else json.loads(line)

    def end(self) -> None:
        """End it at once, and what it has started."""
        self._finalizer()


def answer_questions(answer: Callable[[Any], object]) -> None:
    """Be the process: answer lines of JSON with lines of JSON until there is nothing more to read."""
    # Libraries print; what they print is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    _bound_memory()
    _tell(answers, True)
    for line in sys.stdin:
        _bound_time()
        _tell(answers, answer(json.loads(line)))


def _tell(answers: TextIO, value: object) -> None:
    answers.write(f"{json.dumps(value)}\n")
    answers.flush()


def _bound_memory() -> None:
    if sys.platform != "win32":
        # Windows has none of it.
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _bound_time() -> None:
    if sys.platform != "win32":
        import resource  # noqa: PLC0415

        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_SECONDS, most))


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # what was not read any more
                stream.close()
