"""The processes that hold data: a tenant's processors are in one of them, and each does one call at a time."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from twinkle.core.errors import LimitReached, TransientError
from twinkle.core.job import JobFailed
from twinkle.workers.jobs.heavy import HeavyWork
from twinkle.workers.processors.orders import Done, Order, Refused, Unknown, perform

_log = structlog.get_logger()


class ProcessLost(TransientError):
    """The process at it has died, perhaps for lack of memory."""

    code = "worker_lost"


@dataclass
class Child:
    """One process, started with its first call and ended when it was idle for long or has taken too much memory."""

    folder: Path
    work: HeavyWork = field(default_factory=HeavyWork)
    tenants: set[str] = field(default_factory=set)
    is_busy: bool = False
    used_at: float = 0.0
    is_running: bool = False


class Children:
    """Some processes. A tenant stays with the one that it came to first, for there its data are in memory."""

    def __init__(
        self, num_processes: int, *, folder: Path, call_s: float, reward_s: float, memory_bytes: int, idle_s: float
    ) -> None:
        """Start nothing yet.

        Args:
            num_processes: How many there may be.
            folder: Where each has one of its own, which goes with it.
            call_s: How long a call may take.
            reward_s: How long one of a reward may, if that is less.
            memory_bytes: What a process may have taken after a call; then it is begun anew.
            idle_s: After so long without a call a process is ended.
        """
        self._children = [Child(folder=folder / str(number)) for number in range(num_processes)]
        self._reward_s = min(reward_s, call_s)
        self._call_s = call_s
        self._memory_bytes = memory_bytes
        self._idle_s = idle_s

    def free_for(self, tenant: str) -> Child | None:
        """The process of a tenant, if it has nothing to do."""
        child = next((child for child in self._children if tenant in child.tenants), None)
        if child is None:
            child = min(self._children, key=lambda each: (each.is_busy, len(each.tenants)))
            if not child.is_busy:
                child.tenants.add(tenant)
        return None if child.is_busy else child

    async def perform(self, child: Child, order: Order) -> Done | Refused | Unknown:
        """Have a call done.

        Raises:
            LimitReached: It took too long; the process was ended.
            ProcessLost: The process died under it.
        """
        child.is_running = True
        is_reward = order.processor_type == "reward"
        limit_s = self._reward_s if is_reward else self._call_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await child.work.run(perform, replace(order, folder=str(child.folder)))
        except TimeoutError:
            await self._end(child)
            whose = f"a reward ({order.class_type})" if is_reward else order.step.method
            setting = "TWINKLE_PROCESSOR_REWARD_S" if is_reward else "TWINKLE_PROCESSOR_CALL_S"
            raise LimitReached(
                f"{whose} took more than {limit_s:g} s, and that is the limit of one call; do it with fewer rows, or"
                f" ask the operator for more ({setting})"
            ) from None
        except JobFailed as error:
            child.is_running = False
            raise ProcessLost(f"the process that did {order.step.method} died, perhaps for lack of memory") from error
        child.used_at = asyncio.get_running_loop().time()
        if isinstance(answer, Done) and answer.rss_bytes > self._memory_bytes:
            _log.info("processors.process_renewed", rss_bytes=answer.rss_bytes, limit_bytes=self._memory_bytes)
            await self._end(child)
        return answer

    async def end_idle(self) -> None:
        """End the processes that nothing was asked of for long: what they hold is made anew when it is."""
        now = asyncio.get_running_loop().time()
        for child in self._children:
            if child.is_running and not child.is_busy and now - child.used_at > self._idle_s:
                _log.info("processors.process_ended", idle_s=self._idle_s)
                await self._end(child)

    @property
    def num_running(self) -> int:
        """How many processes there are."""
        return sum(child.is_running for child in self._children)

    async def close(self) -> None:
        """End all; what they are at is lost."""
        for child in self._children:
            await self._end(child)

    async def _end(self, child: Child) -> None:
        await asyncio.to_thread(child.work.stop)
        await asyncio.to_thread(shutil.rmtree, child.folder, ignore_errors=True)
        child.is_running = False
        child.tenants.clear()
