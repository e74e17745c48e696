"""Several encoded rows laid into one, so that a batch holds tokens instead of padding.

Position ids begin anew with every member; :class:`~twinkle.processor.InputProcessor` takes the members apart by that,
so that none sees another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.data_format.media import OF_PICTURES, num_pictures
from twinkle.dataset.bins import pack_lengths
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.iterable import IterableDataset
from twinkle.dataset.member import Member
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.problems import Place
from twinkle.dataset.source import ORIGIN
from twinkle.dataset.steps import Keep, Row, Step
from twinkle.infra.progress import track
from twinkle.processor.media import MEMBER_LENGTHS, MEMBER_PICTURES, STACKED, stacked
from twinkle.template import Template

DEFAULT_LENGTH = 2048
"""Of a packed row where the template sets no limit."""
ALONE = ("pixel_values_videos", "input_features")
"""What a row with films or sound has: such a row lies with no other."""
KINDS = "mm_token_type_ids"

log = event_log()


class PackingDataset(Dataset):
    """Rows that are packed to the template's ``max_length``: call ``encode()``, then ``pack_dataset()``.

    Args:
        dataset_meta: The first member.
        packing_num_proc: Not used; packing a million rows takes seconds in one process.
        load_kwargs: As of :class:`Dataset`.
    """

    def __init__(
        self, dataset_meta: DatasetMeta | str | None = None, packing_num_proc: int = 1, **load_kwargs: Any
    ) -> None:
        self._bins: list[list[int]] | None = None
        self._tokens: Any = None
        self._pictures: Any = None
        super().__init__(dataset_meta, **load_kwargs)

    def pack_dataset(self) -> None:
        """Lay encoded rows together, as few packed rows as best-fit decreasing makes.

        Raises:
            InvalidInput: Rows are not encoded, hold films or sound, or are longer than a packed row.
        """
        rows = self.only.rows
        if "length" not in rows.column_names or "input_ids" not in rows.column_names:
            raise InvalidInput("dataset", "is not encoded; call encode() before pack_dataset()")
        _refuse_alone(rows.column_names)
        names = [name for name, feature in rows.features.items() if _is_list_of_numbers(feature)]
        lengths = rows.select_columns(["length"]).with_format("numpy")[:]["length"].tolist()
        capacity = packed_length(self.template)
        with track("pack", total=len(lengths)) as progress:
            self._bins = pack_lengths(lengths, capacity, advance=progress.advance)
        pictures = [name for name in (*OF_PICTURES, KINDS) if name in rows.column_names]
        self._pictures = rows.select_columns(sorted({*names, *pictures, "position_ids"})) if pictures else None
        self._tokens = rows.select_columns(names).with_format("arrow")
        filled = sum(lengths) / (len(self._bins) * capacity) if self._bins else 0.0
        log.info("dataset.packed", rows=len(lengths), packed=len(self._bins), length=capacity, filled=round(filled, 4))

    @property
    def members_of_rows(self) -> Sequence[Sequence[int]]:
        """The numbers of the rows that lie in each packed row."""
        if self._bins is None:
            raise InvalidInput("dataset", "is not packed; call pack_dataset() after encode()")
        return self._bins

    def row(self, index: int) -> Row:
        """A packed row: lists of numbers one after the other, and ``length``; with what is of its pictures."""
        if self._pictures is not None:
            return packed([self._pictures[number] for number in self.members_of_rows[int(index)]])
        table = self._tokens[self.members_of_rows[int(index)]]
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        row: Row = {name: values.flatten().to_numpy(zero_copy_only=False).tolist() for name, values in columns.items()}
        lengths = columns["input_ids"].value_lengths().to_pylist()
        return {**row, "position_ids": _positions(lengths), "length": sum(lengths)}

    def place_of(self, index: int) -> Place:
        """Where the first member of a packed row comes from."""
        first = self.members_of_rows[int(index)][0]
        return self.place(int(self.only.rows.select_columns([ORIGIN])[first][ORIGIN]))

    def __len__(self) -> int:
        return len(self.members_of_rows)

    def _do(self, step: Step, member: Member, *, load_from_cache_file: bool, **options: Any) -> None:
        self._bins = None
        super()._do(step, member, load_from_cache_file=load_from_cache_file, **options)

    def _keep(self, step: Keep, member: Member, **options: Any) -> None:
        self._bins = None
        super()._keep(step, member, **options)


class IterablePackingDataset(IterableDataset):
    """A stream of packed rows: so many encoded rows are packed at a time.

    Args:
        dataset_meta: The first member.
        packing_interval: Rows that are packed together. What does not fill a row goes on to the next interval.
        packing_num_proc: Not used.
        cyclic: Begin anew at the end, for ever.
        load_kwargs: As of :class:`IterableDataset`.
    """

    def __init__(
        self,
        dataset_meta: DatasetMeta | str | None = None,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        **load_kwargs: Any,
    ) -> None:
        if packing_interval < 1:
            raise InvalidInput("packing_interval", f"is {packing_interval}; send at least 1")
        super().__init__(dataset_meta, **load_kwargs)
        self.packing_interval = packing_interval
        self.cyclic = cyclic

    def pack_dataset(self) -> None:
        """Nothing that would not happen anyhow: rows are packed as they come."""

    def stream(self) -> Iterator[Row]:
        """The packed rows from the first on."""
        return _PackedStream(self)

    def encoded(self) -> Iterator[Row]:
        """The rows that are to be packed."""
        return super().stream()


class _PackedStream(Iterator[Row]):
    """A wrong row raises and leaves what waits as it is: the next call goes on behind it."""

    def __init__(self, dataset: IterablePackingDataset) -> None:
        self._dataset = dataset
        self._rows = dataset.encoded()
        self._capacity = packed_length(dataset.template)
        self._interval = dataset.packing_interval
        self._waiting: list[Row] = []
        self._ready: list[list[Row]] = []
        self._fresh = 0
        self._taken = 0
        """Rows of this round: a cycle of none would never end."""
        self._is_over = False

    def __next__(self) -> Row:
        while not self._ready:
            if self._is_over:
                raise StopIteration
            self._fill()
            self._pack()
        return packed(self._ready.pop(0))

    def _fill(self) -> None:
        while self._fresh < self._interval:
            try:
                row = next(self._rows)
            except StopIteration:
                if not self._dataset.cyclic or not self._taken:
                    self._is_over = True
                    return
                self._rows, self._taken = self._dataset.encoded(), 0
                continue
            if "input_ids" not in row:
                raise InvalidInput("dataset", "is not encoded; call encode() before its rows are taken")
            _refuse_alone(row)
            self._waiting.append(row)
            self._fresh += 1
            self._taken += 1

    def _pack(self) -> None:
        bins = pack_lengths([len(row["input_ids"]) for row in self._waiting], self._capacity)
        bins.sort(key=lambda members: sum(len(self._waiting[number]["input_ids"]) for number in members))
        # The emptiest waits for rows to come, unless it is the only one and would wait for ever.
        kept = [] if self._is_over or len(bins) < 2 else bins.pop(0)
        self._ready = [[self._waiting[number] for number in members] for members in sorted(bins)]
        self._waiting = [self._waiting[number] for number in kept]
        self._fresh = 0


def packed(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Encoded rows one after the other."""
    lengths = [len(row["input_ids"]) for row in rows]
    names = [name for name, values in rows[0].items() if name != KINDS and _is_numbers(values)]
    joined: Row = {name: np.concatenate([np.asarray(row[name]) for row in rows]).tolist() for name in names}
    joined |= {"position_ids": _positions(lengths), "length": sum(lengths)}
    return joined | _packed_pictures(rows, lengths) if any(num_pictures(row) for row in rows) else joined


def _packed_pictures(rows: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Row:
    """What is of the pictures of all rows, and where each row lies in it."""
    media: Row = {}
    for name, filling in STACKED.items():
        values = [torch.as_tensor(row[name]) for row in rows if row.get(name) is not None]
        if values:
            media[name] = stacked(name, values, filling).numpy()
    kinds = [
        np.zeros(length, dtype=np.int64) if row.get(KINDS) is None else np.asarray(row[KINDS]).reshape(-1)
        for row, length in zip(rows, lengths, strict=True)
    ]
    positions = [np.asarray(row["position_ids"]) for row in rows]
    if any(of_row.ndim == 2 for of_row in positions):
        positions = [np.broadcast_to(of_row, (3, length)) for of_row, length in zip(positions, lengths, strict=True)]
    return {
        **media,
        KINDS: np.concatenate(kinds).tolist(),
        "position_ids": np.concatenate(positions, axis=-1).tolist(),
        MEMBER_LENGTHS: list(lengths),
        MEMBER_PICTURES: [num_pictures(row) for row in rows],
    }


def packed_length(template: Template | None) -> int:
    """How many tokens a packed row may have."""
    return DEFAULT_LENGTH if template is None or template.max_length is None else template.max_length


def _positions(lengths: Sequence[int]) -> list[int]:
    return [position for length in lengths for position in range(length)]


def _is_numbers(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim == 1 and values.dtype.kind in "iufb"
    return isinstance(values, list) and bool(values) and all(isinstance(value, int | float) for value in values)


def _is_list_of_numbers(feature: Any) -> bool:
    is_list = isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Value)
    return is_list and feature.feature.dtype.startswith(("int", "uint", "float", "bool"))


def _refuse_alone(names: Any) -> None:
    for name in ALONE:
        if name in names:
            raise InvalidInput(
                name, "is in these rows: a row with films or sound lies with no other; leave such rows out"
            )
