"""What plans need of the training library: done by the jobs process, which has it. Each owner adds its method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twinkle.grading.grade import RewardRequest
from twinkle.jobs.data import DataRequest, DataRow, PreparedData
from twinkle.jobs.exporting import ExportOrder, ExportWork
from twinkle.jobs.script_tools import ScriptTools


class Tools(ScriptTools, Protocol):
    """What a plan is given. None of it blocks the event loop."""

    async def prepare_data(self, request: DataRequest) -> PreparedData:
        """Look at every row and encode it; what was made before of the same rows is found again.

        Raises:
            JobFailed: ``invalid_data``, with the first hundred problems by line, column and reason; nothing was made.
                ``file_not_found`` where there is no such file; transient where a store did not answer.
        """
        ...

    async def read_rows(self, prepared: PreparedData, numbers: list[int]) -> list[DataRow]:
        """Some rows of prepared data, in the order of the numbers.

        Raises:
            JobFailed: Transient: the rows are gone or the store did not answer; the next attempt prepares them again.
        """
        ...

    async def grade(self, tenant: str, request: RewardRequest) -> float:
        """What an answer is worth by a reward of the library, or whether a pattern is found in it.

        Raises:
            GraderFailed: It took too long, or the reward cannot judge it.
        """
        ...

    async def decode(self, model: str, answers: Sequence[Sequence[int]]) -> list[str]:
        """The texts of sampled tokens, without the special ones, by the tokenizer of a base model.

        Raises:
            JobFailed: The model is not served, or its tokenizer cannot be read here.
        """
        ...

    async def vocabulary(self, model: str) -> str:
        """What tells whether two base models mean the same by a token: equal digests, equal meanings.

        Raises:
            JobFailed: As :meth:`decode` does.
        """
        ...

    async def open_export(self, order: ExportOrder) -> ExportWork:
        """Begin an export, or go on with it: find what is exported, and judge whether it can be.

        Raises:
            JobFailed: There is no such checkpoint, or it cannot be exported as it was asked for, by name.
            InvalidInput: The target is not allowed, or the adapter does not fit its base model.
            LimitReached: The tenant has no room for it.
        """
        ...
