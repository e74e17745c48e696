"""What a heavy process is asked of data, and what it answers: the process that asks loads nothing of what it takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from twinkle.jobs.data import DataProblem, DataRequest, PreparedData
from twinkle.storage.files.records import FilePiece


@dataclass(frozen=True, kw_only=True)
class DataWork:
    """One request with all that is needed to do it.

    Args:
        request: What is asked.
        digest: What it is found by.
        folder: Where the shards go.
        object_store: The URL of where that is.
        model_path: A folder with the model's tokenizer.
        max_length: Tokens that the model takes.
        vocab_size: The model's.
        file_name: Of the tenant's file, which says what it is.
        pieces: Where the file lies.
    """

    request: DataRequest
    digest: str
    folder: str
    object_store: str
    model_path: str
    max_length: int
    vocab_size: int
    file_name: str = ""
    pieces: tuple[FilePiece, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataOutcome:
    """What came of it: rows that lie ready, or what is wrong. ``num_shards`` were written either way."""

    prepared: PreparedData | None
    num_shards: int
    size_bytes: int
    num_rows: int
    num_wrong: int
    problems: list[DataProblem]

    def details(self) -> dict[str, Any]:
        """Of a failure, as plain values."""
        return {
            "rows": self.num_rows,
            "wrong": self.num_wrong,
            "errors": [asdict(problem) for problem in self.problems],
        }


def prepare(work: DataWork) -> DataOutcome:
    """See :func:`twinkle.workers.jobs.data_preparing.prepare`, which is loaded where this is called."""
    outcome: DataOutcome = import_module("twinkle.workers.jobs.data_preparing").prepare(work)
    return outcome
