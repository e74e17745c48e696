"""Files of training data in an object store, prepared in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.jobs.data import DataRequest, DataRow, DataRows
from twinkle.storage.blobs import FolderStore
from twinkle.storage.files.records import FilePiece
from twinkle.workers.jobs.data_work import DataOutcome, DataWork, prepare

MODEL_LENGTH = 512


def jsonl(*rows: Mapping[str, Any]) -> bytes:
    """Lines of JSON."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


class DataBench:
    """Prepares data for one model."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.blobs = FolderStore(folder)
        self._num_done = 0

    def prepare(self, data: bytes, name: str = "data.jsonl", *, piece_bytes: int = 1000, **options: Any) -> DataOutcome:
        """What comes of a file that lies in pieces."""
        pieces = []
        for start in range(0, len(data), piece_bytes):
            piece = data[start : start + piece_bytes]
            self.blobs.put(key := f"files/{name}/{start}", piece)
            pieces.append(FilePiece(key=key, size_bytes=len(piece)))
        self._num_done += 1
        return prepare(
            DataWork(
                request=DataRequest(**{"tenant": "t", "model": "m", "file": "file-1"} | options),
                digest="d",
                folder=f"prepared/day/{self._num_done}",
                object_store=str(self.folder),
                model_path=str(self.model),
                max_length=MODEL_LENGTH,
                vocab_size=400,
                file_name=name,
                pieces=tuple(pieces),
            )
        )

    def rows(self, data: bytes, name: str = "data.jsonl", **options: Any) -> Sequence[DataRow]:
        """The rows that come of a file."""
        outcome = self.prepare(data, name, **options)
        assert outcome.prepared is not None, [str(problem) for problem in outcome.problems]
        return DataRows(self.blobs, outcome.prepared).rows(range(outcome.prepared.num_rows))
