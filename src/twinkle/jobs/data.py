"""Training data as plans see it: what is asked of whoever prepares it, what comes of it, and its rows by number.

Rows lie in shards in the object store, which are made once for a file, a template and options, whoever of the tenant
asks. A shard is a line of JSON that says what follows, then arrays: a plan takes row ``i`` without reading the others.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from twinkle.core.errors import InvalidInput
from twinkle.storage.blobs import BlobStore
from twinkle.storage.files.prepared import shard_key

MOST_PROBLEMS = 100
"""How many wrong rows are told by name; all are counted."""
TRUNCATIONS = ("raise", "left", "right", "split", "delete")
_CACHED_SHARDS = 32
_FLAG = np.uint8


class DataUse(StrEnum):
    """What the rows are for, which says what a row must hold."""

    SUPERVISED = "supervised"
    """One sequence a row, some of whose tokens train."""
    PREFERENCE = "preference"
    """Two sequences a row: the chosen one, then the rejected one."""
    PROMPTS = "prompts"
    """One sequence a row, up to where the model is to go on; the row's own fields come with it as ``item``."""


class DataFormat(StrEnum):
    """How a row says what it holds. ``auto``: found from the first row, and then the same for all."""

    AUTO = "auto"
    CHAT = "chat"
    """``messages``, perhaps ``tools``; a message's ``weight`` 0 keeps it from training."""
    COMPLETION = "completion"
    """``prompt`` and ``completion``, texts or lists of messages."""
    PREFERENCE = "preference"
    """OpenAI's ``input``, ``preferred_output``, ``non_preferred_output``; or ``chosen`` and ``rejected``."""
    TEXT = "text"
    """``text``, all of which trains."""
    TOKENS = "tokens"
    """``input_ids`` (or ``tokens``) with ``labels`` at the places of their tokens, or with ``weights``."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Which rows, for which model, encoded how. Equal requests have equal rows.

    Args:
        tenant: Whose.
        model: The base model, as clients name it.
        use: What for.
        file: The id of one of the tenant's files (JSONL, CSV or Parquet, by its name); or
        dataset: ``ms://org/name``, ``hf://org/name`` or ``org/name``, perhaps with ``@revision``.
        subset: Of a hub's data set.
        split: Of a hub's data set.
        preprocessor: Makes conversations of a data set's columns: one of those that the workbench brings, by name.
        preprocessor_args: What it is made with.
        format: How a row says what it holds.
        template: The class that encodes.
        system: The system message of conversations that have none.
        enable_thinking: What the chat template is told.
        max_length: Tokens of a sequence at most; None for what the model takes.
        truncation: What becomes of a longer one: ``raise``, ``left``, ``right``, ``split`` or ``delete``.
        max_rows: Only so many from the first on.
    """

    tenant: str
    model: str
    use: DataUse = DataUse.SUPERVISED
    file: str | None = None
    dataset: str | None = None
    subset: str = "default"
    split: str = "train"
    preprocessor: str | None = None
    preprocessor_args: Mapping[str, Any] = field(default_factory=dict)
    format: DataFormat = DataFormat.AUTO
    template: str = "Template"
    system: str | None = None
    enable_thinking: bool = True
    max_length: int | None = None
    truncation: Literal["raise", "left", "right", "split", "delete"] = "raise"
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.dataset is None):
            raise InvalidInput("data", "name either a file of yours or a data set of a hub")
        if self.truncation not in TRUNCATIONS:
            raise InvalidInput("truncation", f"is {self.truncation!r}; send one of {', '.join(TRUNCATIONS)}")
        if self.truncation == "split" and self.use is not DataUse.SUPERVISED:
            raise InvalidInput("truncation", "'split' makes several rows of one, which is for supervised data alone")

    def options(self) -> dict[str, Any]:
        """What, beside the bytes of the rows and the model's tokenizer, decides what is made of them."""
        facts = asdict(self)
        for name in ("tenant", "model", "file"):
            del facts[name]
        return facts


@dataclass(frozen=True, kw_only=True)
class DataProblem:
    """What is wrong with a row. ``line`` counts from 1, ``row`` from 0; no ``column``: the row as a whole is.

    ``character`` is where in its line a line stops being JSON, from 1.
    """

    line: int | None
    row: int
    column: str
    reason: str
    character: int | None = None

    def __str__(self) -> str:
        place = f"row {self.row}" if self.line is None else f"line {self.line}"
        return f"{place}: {self.column}: {self.reason}" if self.column else f"{place}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Rows that lie ready. Plain JSON by :meth:`to_json`, so that a job may keep it.

    Args:
        digest: Of the rows' bytes, the tokenizer and the options: what it is found by.
        folder: Where the shards are.
        use: What the rows are for.
        format: What they were.
        num_rows: How many there are.
        num_tokens: Of all sequences of all rows.
        num_trained: Those among them that train.
        longest: The longest sequence.
        first_rows: The number of each shard's first row.
        report: What a person wants to know, as plain values: ``tokens`` with a histogram, ``truncation``, ``preview``.
    """

    digest: str
    folder: str
    use: DataUse
    format: DataFormat
    num_rows: int
    num_tokens: int
    num_trained: int
    longest: int
    first_rows: tuple[int, ...]
    report: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PreparedData:
        """What :meth:`to_json` gave."""
        known = {**value, "use": DataUse(value["use"]), "format": DataFormat(value["format"])}
        return cls(**{**known, "first_rows": tuple(value["first_rows"])})


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Tokens, and at each place the token that comes after it with its weight: 0 where it does not train."""

    input_ids: npt.NDArray[np.int32]
    target_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    @property
    def num_trained(self) -> int:
        """How many targets train."""
        return int(np.count_nonzero(self.weights))

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class DataRow:
    """One row: one sequence, or the chosen and the rejected one; ``item`` are a prompt's own fields.

    ``line`` is where it stands in its file, from 1; none of rows that have no lines.
    """

    number: int
    sequences: tuple[TokenSequence, ...]
    item: dict[str, Any] | None = None
    line: int | None = None

    @property
    def sequence(self) -> TokenSequence:
        """The only one, or the chosen one."""
        return self.sequences[0]

    @property
    def chosen(self) -> TokenSequence:
        """Of a pair."""
        return self.sequences[0]

    @property
    def rejected(self) -> TokenSequence:
        """Of a pair."""
        return self.sequences[1]


def write_shard(rows: Sequence[DataRow]) -> bytes:
    """The bytes of a shard, the same for the same rows."""
    sequences = [sequence for row in rows for sequence in row.sequences]
    weights = np.concatenate([sequence.weights for sequence in sequences])
    are_flags = bool(np.isin(weights, (0, 1)).all())
    # All targets but a sequence's last are its own tokens.
    last = [int(sequence.target_ids[-1]) for sequence in sequences]
    items = [row.item for row in rows] if any(row.item is not None for row in rows) else None
    head = {
        "rows": len(rows),
        "sequences": len(sequences),
        "tokens": int(sum(len(sequence) for sequence in sequences)),
        "flags": are_flags,
        "items": items,
        "lines": [row.line for row in rows] if any(row.line is not None for row in rows) else None,
    }
    arrays = [
        np.cumsum([0, *(len(sequence) for sequence in sequences)], dtype="<i8"),
        np.array(last, dtype="<i4"),
        np.concatenate([sequence.input_ids for sequence in sequences]).astype("<i4"),
        weights.astype(_FLAG if are_flags else "<f4"),
    ]
    text = json.dumps(head, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return b"".join([text.encode(), b"\n", *(array.tobytes() for array in arrays)])


def read_shard(data: bytes, *, first: int) -> list[DataRow]:
    """The rows of a shard, the first of which has the number ``first``."""
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    num_sequences, num_tokens = head["sequences"], head["tokens"]
    at = 8 * (num_sequences + 1)
    offsets = np.frombuffer(rest, "<i8", num_sequences + 1)
    last = np.frombuffer(rest, "<i4", num_sequences, at)
    at += 4 * num_sequences
    tokens = np.frombuffer(rest, "<i4", num_tokens, at)
    at += 4 * num_tokens
    weights = np.frombuffer(rest, _FLAG if head["flags"] else "<f4", num_tokens, at).astype(np.float32)
    sequences = []
    for number in range(num_sequences):
        part = slice(int(offsets[number]), int(offsets[number + 1]))
        own = tokens[part]
        sequences.append(TokenSequence(own, np.append(own[1:], last[number]), weights[part]))
    each = num_sequences // max(head["rows"], 1)
    items = head["items"] or [None] * head["rows"]
    # Shards of before it was kept have none.
    lines = head.get("lines") or [None] * head["rows"]
    return [
        DataRow(first + i, tuple(sequences[i * each : (i + 1) * each]), items[i], lines[i]) for i in range(head["rows"])
    ]


class DataRows:
    """The rows of prepared data by number; keeps the last shards it has read. Blocks; for one thread at a time."""

    def __init__(self, blobs: BlobStore, prepared: PreparedData) -> None:
        self._blobs = blobs
        self._prepared = prepared
        self._shards: OrderedDict[int, list[DataRow]] = OrderedDict()

    def __len__(self) -> int:
        return self._prepared.num_rows

    def row(self, number: int) -> DataRow:
        """One row.

        Raises:
            KeyError: The shards are gone: nobody has asked for them in a long time; prepare the data again.
            StorageUnavailable: The object store did not answer.
        """
        if not 0 <= number < self._prepared.num_rows:
            raise IndexError(number)
        shard = bisect_right(self._prepared.first_rows, number) - 1
        if shard not in self._shards:
            data = self._blobs.get(shard_key(self._prepared.folder, shard))
            self._shards[shard] = read_shard(data, first=self._prepared.first_rows[shard])
            while len(self._shards) > _CACHED_SHARDS:
                self._shards.popitem(last=False)
        self._shards.move_to_end(shard)
        return self._shards[shard][number - self._prepared.first_rows[shard]]

    def rows(self, numbers: Sequence[int]) -> list[DataRow]:
        """Some rows, in the order of the numbers; each shard is read once."""
        found = {number: self.row(number) for number in sorted(set(numbers))}
        return [found[number] for number in numbers]
