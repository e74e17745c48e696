"""Rows that a script chooses, maps, encodes and takes by number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import datasets

from twinkle.core.errors import InvalidInput
from twinkle.dataset.base import DatasetBase
from twinkle.dataset.member import Member, log
from twinkle.dataset.problems import Place
from twinkle.dataset.source import ORIGIN
from twinkle.dataset.steps import Keep, Row, Step


class Dataset(DatasetBase):
    """Rows of one or several members, each done with at once: what ``map``, ``filter`` and ``encode`` make is there
    when they return, and what is wrong with a row is said before anything is trained on.

    For the arguments see :class:`~twinkle.dataset.base.DatasetBase`.
    """

    def mix_dataset(self, interleave: bool = True) -> None:
        """Make one of all members: a row of each in turn until the shortest ends, or one member after the other."""
        if len(self.members) > 1:
            parts = [member.rows for member in self.members]
            mix = datasets.interleave_datasets if interleave else datasets.concatenate_datasets
            try:
                rows = mix(parts)
            except ValueError as error:
                raise InvalidInput("dataset", f"members have columns of different kinds: {error}") from error
            left_out = sum(len(part) for part in parts) - len(rows)
            if left_out:
                log.info("dataset.mixed", rows=len(rows), left_out=left_out, reason="the shortest member ends first")
            self.members = [Member("+".join(member.key for member in self.members), rows)]
        self.is_mixed = True

    @property
    def dataset(self) -> Any:
        """The rows as a data set of Hugging Face's."""
        rows = self.only.rows
        return rows.remove_columns(ORIGIN)

    def _do(self, step: Step, member: Member, *, load_from_cache_file: bool, **options: Any) -> None:
        member.rows = self.mapped(member.rows, step, load_from_cache_file=load_from_cache_file, **options)

    def _keep(self, step: Keep, member: Member, **options: Any) -> None:
        before = len(member.rows)
        member.rows = self.filtered(member.rows, step, **options)
        log.info("dataset.filtered", by=step.doing, kept=len(member.rows), left_out=before - len(member.rows))

    def place_of(self, index: int) -> Place:
        """Where a row comes from."""
        return self.place(int(self.only.rows.select_columns([ORIGIN])[int(index)][ORIGIN]))

    def row(self, index: int) -> Row:
        """A row, without its being written by ``save_as(mode="training")``."""
        row: Row = self.only.rows[int(index)]
        return {name: value for name, value in row.items() if name != ORIGIN}

    def __len__(self) -> int:
        return len(self.only.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self.row(index)
        self.record([row])
        return row

    def __iter__(self) -> Iterator[Row]:
        for index in range(len(self)):
            yield self[index]

    def unrecorded(self) -> Iterator[Row]:
        """See :class:`~twinkle.dataset.base.DatasetBase`."""
        for index in range(len(self)):
            yield self.row(index)
