"""All rows of one request looked at, encoded and laid into shards: in a process of its own, and in constant memory.

Nothing is kept of data that is wrong: its problems are all that comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.process.crash import crash_point
from twinkle.data_format.row_error import RowError
from twinkle.dataset.problems import Place, problem_of
from twinkle.jobs.data import (
    MOST_PROBLEMS,
    DataFormat,
    DataProblem,
    DataRequest,
    DataRow,
    DataUse,
    PreparedData,
    TokenSequence,
    write_shard,
)
from twinkle.preprocessor import PREPROCESSORS, Preprocessor
from twinkle.storage.blobs import BlobStore, open_blob_store
from twinkle.storage.files.prepared import shard_key
from twinkle.workers.jobs.data_encoding import DataMeasures, Encoder
from twinkle.workers.jobs.data_formats import check_use, format_of, samples_of
from twinkle.workers.jobs.data_source import RawRow, limited, rows_of_dataset, rows_of_file
from twinkle.workers.jobs.data_work import DataOutcome, DataWork

_SHARD_TOKENS = 1 << 18
_SHARD_ROWS = 2048


def prepare(work: DataWork) -> DataOutcome:
    """Do it. Blocks for as long as it takes.

    Raises:
        InvalidInput: The request cannot be done, whatever the rows are.
        StorageUnavailable: The object store did not answer.
    """
    return _Preparing(work, open_blob_store(work.object_store)).run()


class _Preparing:
    """One request on its way."""

    def __init__(self, work: DataWork, blobs: BlobStore) -> None:
        self._work = work
        self._blobs = blobs
        self._encoder = Encoder(
            work.request, model_path=work.model_path, max_length=work.max_length, vocab_size=work.vocab_size
        )
        self._measures = DataMeasures(work.request.truncation, self._encoder.max_length)
        self._preprocessor = _preprocessor(work.request)
        self._format = work.request.format
        self._shards = _Shards(blobs, work.folder)
        self._problems: list[DataProblem] = []
        self._num_raw = self._num_wrong = 0

    def run(self) -> DataOutcome:
        request = self._work.request
        if self._format is not DataFormat.AUTO:
            check_use(self._format, request.use)
        for raw in limited(self._rows(), request.max_rows):
            self._num_raw += 1
            self._take(raw)
        if not self._num_raw:
            raise InvalidInput("data", "has no rows")
        self._shards.flush()
        prepared = None
        if not self._num_wrong and self._shards.num_rows:
            prepared = self._described()
        elif not self._num_wrong:
            self._note(DataProblem(line=None, row=0, column="", reason="no row is left: all are too long"))
        return DataOutcome(
            prepared=prepared,
            num_shards=len(self._shards.first_rows),
            size_bytes=self._shards.size_bytes,
            num_rows=self._num_raw,
            num_wrong=self._num_wrong,
            problems=self._problems,
        )

    def _rows(self) -> Iterator[RawRow]:
        request = self._work.request
        if request.dataset is not None:
            return rows_of_dataset(request.dataset, request.subset, request.split)
        return rows_of_file(self._blobs, self._work.pieces, self._work.file_name)

    def _take(self, raw: RawRow) -> None:
        if raw.problem is not None:
            self._note(raw.problem)
            return
        self._measures.at(line=raw.line, row=raw.number)
        try:
            for row in self._encoded(raw):
                # Of data that is wrong nothing is kept, but the rest of it is looked at.
                if not self._num_wrong:
                    self._shards.add(row)
        except RowError as error:
            self._note(DataProblem(line=raw.line, row=raw.number, column=error.field, reason=error.reason))

    def _encoded(self, raw: RawRow) -> list[DataRow]:
        request = self._work.request
        fields = raw.fields
        if self._preprocessor is not None:
            fields = self._preprocessed(raw)
        if self._format is DataFormat.AUTO:
            self._format = format_of(fields, request.use)
        samples = samples_of(fields, self._format, request.use)
        made = [self._encoder.sequences(sample, self._measures) for sample in samples]
        item = dict(raw.fields) if request.use is DataUse.PROMPTS else None
        if len(made) == 1:
            return [DataRow(0, (sequence,), item, raw.line) for sequence in made[0]]
        pair: list[TokenSequence] = [sequences[0] for sequences in made if sequences]
        return [DataRow(0, tuple(pair), item, raw.line)] if len(pair) == len(made) else []

    def _preprocessed(self, raw: RawRow) -> dict[str, Any]:
        assert self._preprocessor is not None, "asked only where there is one"
        try:
            return self._preprocessor.preprocess(dict(raw.fields))
        except RowError:
            raise
        except Exception as error:
            # Whatever a preprocessor stumbles over is said of the row.
            problem = problem_of(Place("", None), error)
            raise RowError(problem.column, problem.reason) from error

    def _note(self, problem: DataProblem) -> None:
        self._num_wrong += 1
        if len(self._problems) < MOST_PROBLEMS:
            self._problems.append(problem)

    def _described(self) -> PreparedData:
        shards = self._shards
        return PreparedData(
            digest=self._work.digest,
            folder=self._work.folder,
            use=self._work.request.use,
            format=self._format,
            num_rows=shards.num_rows,
            num_tokens=shards.num_tokens,
            num_trained=shards.num_trained,
            longest=shards.longest,
            first_rows=tuple(shards.first_rows),
            report={"rows": self._num_raw, **self._measures.report()},
        )


@dataclass
class _Shards:
    """Rows laid together as they come."""

    blobs: BlobStore
    folder: str
    first_rows: list[int] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    longest: int = 0
    size_bytes: int = 0
    _open: list[DataRow] = field(default_factory=list)
    _open_tokens: int = 0

    def add(self, row: DataRow) -> None:
        """Lay one row to the others."""
        self._open.append(row)
        num_tokens = sum(len(sequence) for sequence in row.sequences)
        self._open_tokens += num_tokens
        self.num_tokens += num_tokens
        self.num_trained += sum(sequence.num_trained for sequence in row.sequences)
        self.longest = max(self.longest, *(len(sequence) for sequence in row.sequences))
        if self._open_tokens >= _SHARD_TOKENS or len(self._open) >= _SHARD_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is open."""
        if not self._open:
            return
        data = write_shard(self._open)
        self.blobs.put(shard_key(self.folder, len(self.first_rows)), data)
        crash_point("data.shard_written")
        self.first_rows.append(self.num_rows)
        self.num_rows += len(self._open)
        self.size_bytes += len(data)
        self._open, self._open_tokens = [], 0


def _preprocessor(request: DataRequest) -> Preprocessor | None:
    """One of those that the workbench brings: no other's code runs for a tenant."""
    if request.preprocessor is None:
        return None
    if request.preprocessor not in PREPROCESSORS:
        known = ", ".join(sorted(PREPROCESSORS))
        raise InvalidInput("preprocessor", f"is {request.preprocessor!r}; send one of {known}")
    try:
        return PREPROCESSORS[request.preprocessor](**request.preprocessor_args)
    except TypeError as error:
        raise InvalidInput("preprocessor_args", f"do not fit {request.preprocessor}: {error}") from error
