"""Rows for fine-tuning jobs that nobody has to encode, and what came of such jobs."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.fake_worker import BASE_MODEL, FakeWorker
from harness.jobs import JobRig
from twinkle.core.job import Job, JobFailed, JsonObject
from twinkle.core.operation import OperationKind
from twinkle.jobs.data import DataFormat, DataRequest, DataRow, DataUse, PreparedData, TokenSequence


class MemoryTools:
    """Our own twin of what prepares data: every file has so many rows, whose tokens follow from their numbers."""

    def __init__(self, *, num_rows: int = 10) -> None:
        self.num_rows = num_rows
        self.digest = "rows"
        self.refusal: JobFailed | None = None
        self.first_line: int | None = None
        """Of the first row in its file, where rows have lines."""

    async def prepare_data(self, request: DataRequest) -> PreparedData:
        if self.refusal is not None:
            raise self.refusal
        return PreparedData(
            digest=f"{self.digest}-{request.file}",
            folder="nowhere",
            use=request.use,
            format=DataFormat.TOKENS,
            num_rows=self.num_rows,
            num_tokens=self.num_rows * 6,
            num_trained=self.num_rows * 4,
            longest=8,
            first_rows=(0,),
            report={},
        )

    async def read_rows(self, prepared: PreparedData, numbers: list[int]) -> list[DataRow]:
        sequences = 2 if prepared.use is DataUse.PREFERENCE else 1
        return [
            DataRow(
                number,
                tuple(row_of(number, side) for side in range(sequences)),
                line=None if self.first_line is None else self.first_line + number,
            )
            for number in numbers
        ]


def row_of(number: int, side: int = 0) -> TokenSequence:
    """Six tokens, of which the last four train."""
    tokens = np.arange(7, dtype=np.int32) + 10 * number + 5 * side
    return TokenSequence(tokens[:-1], tokens[1:], np.array([0, 0, 1, 1, 1, 1], np.float32))


def spec_of(**values: Any) -> JsonObject:
    """A fine-tuning of the fake worker's model."""
    return {"model": BASE_MODEL, "data": "file-a", "rank": 4, **values}


def metrics_of(rig: JobRig, job: Job) -> list[dict[str, Any]]:
    """The metrics of a job in their order, but for what the clock says."""
    events = rig.stores.jobs.events(job.id, job.tenant, limit=1000)
    return [
        {name: value for name, value in event.data.items() if name != "seconds"}
        for event in events
        if event.kind == "metrics"
    ]


def run_of(job: Job) -> str:
    """The training run that a job ended with."""
    assert job.result is not None, job.failure
    return str(job.result["run"])


def told(job: Job) -> JsonObject:
    """A result without what says which job it was."""
    assert job.result is not None, job.failure
    hidden = {"run", "checkpoint", "sampler_checkpoint", "checkpoints"}
    return {name: value for name, value in job.result.items() if name not in hidden}


def done_in(worker: FakeWorker, job: Job) -> list[tuple[int, OperationKind, bytes]]:
    """What a job's training run did, in a form that is the same for equal jobs."""
    run = run_of(job)
    return [
        (claim.seq, claim.kind, worker.payload(claim).replace(run.encode(), b"RUN"))
        for claim in worker.executed_of(run)
        if claim.seq
    ]
