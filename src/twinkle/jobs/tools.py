"""What plans need of the training library: done by the jobs process, which has it. Each owner adds its method."""

from __future__ import annotations

from typing import Protocol

from twinkle.jobs.data import DataRequest, DataRow, PreparedData


class Tools(Protocol):
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
