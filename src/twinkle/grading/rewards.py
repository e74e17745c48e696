"""Rewards and searches, each answer within its time, in a few processes that are ended when it is over."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from weakref import WeakValueDictionary

import structlog

from twinkle.core.process.question_process import QuestionProcess
from twinkle.grading.grade import GraderFailed, ProblemKind, RewardRequest

DEFAULT_SECONDS = 5.0
NUM_PROCESSES = 2
_PROCESS = "twinkle.workers.jobs.reward_process"
"""It computes with the training library, which is nothing that whoever asks imports."""

_log = structlog.get_logger()


class RewardProcesses:
    """Computes rewards for all that a process judges. A tenant's answers are judged one at a time.

    Args:
        seconds: How long one answer may take; one that takes longer has no score, and its process is ended.
        num_processes: How many there are at most; the first starts with the first answer.
    """

    def __init__(self, *, seconds: float = DEFAULT_SECONDS, num_processes: int = NUM_PROCESSES) -> None:
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="rewards")
        self._places = asyncio.Semaphore(num_processes)
        self._idle: list[QuestionProcess] = []
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def grade(self, tenant: str, request: RewardRequest) -> float:
        """The score of one answer of a tenant's.

        Raises:
            GraderFailed: It took too long, or the reward cannot judge it.
        """
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn, self._places:
            process = self._idle.pop() if self._idle else QuestionProcess(_PROCESS)
            answer = None
            try:
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(self._threads, process.ask, asdict(request), self._seconds)
            finally:
                # Without an answer it is busy with the question still.
                if answer is None:
                    process.end()
                else:
                    self._idle.append(process)
        if answer is None:
            _log.warning("reward.given_up", reward=request.reward, seconds=self._seconds, next="it scores 0")
            raise GraderFailed(
                ProblemKind.TIMEOUT, f"{request.reward} took more than {self._seconds:g} s or 2 GiB of memory"
            )
        if "error" in answer:
            raise GraderFailed(ProblemKind.OTHER, str(answer["error"]))
        return float(answer["score"])

    async def close(self) -> None:
        """End all processes; nothing may be asked any more."""
        for process in self._idle:
            process.end()
        self._idle.clear()
        await asyncio.to_thread(self._threads.shutdown)
