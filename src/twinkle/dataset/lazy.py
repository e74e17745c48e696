"""Rows that are mapped and encoded when they are taken: for pictures, which would fill a disk as numbers."""

from __future__ import annotations

from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.member import Member, log
from twinkle.dataset.problems import Place, WrongRows
from twinkle.dataset.source import ORIGIN
from twinkle.dataset.steps import Keep, Row, Step, is_check
from twinkle.infra.progress import track


class LazyDataset(Dataset):
    """Rows to which ``map``, ``encode`` and ``check`` are done when they are taken, and ``filter`` at once.

    A row that cannot be encoded raises :class:`WrongRows` when it is taken; a ``DataLoader`` takes another in its
    place. What is wrong with them all is said by ``report``.
    """

    _interleaves = False

    def mix_dataset(self, interleave: bool = True) -> None:
        """Make one of all members: a row of each in turn, the shorter ones over again until the longest ends; or one
        member after the other.
        """
        self._interleaves = interleave
        self.is_mixed = True

    def _do(self, step: Step, member: Member, *, load_from_cache_file: bool, **options: Any) -> None:
        member.steps.append(step)

    def _keep(self, step: Keep, member: Member, **options: Any) -> None:
        if is_check(step):
            member.steps.append(step)
            return
        steps: list[Step] = [*member.steps, step]
        kept: list[int] = []
        with track(step.doing, total=len(member.rows)) as progress:
            for number, row in enumerate(member.rows):
                made, problem = self.tried(row, steps)
                if problem is not None:
                    self.raise_wrong(member.rows, steps, None)
                if made:
                    kept.append(number)
                progress.advance()
        log.info("dataset.filtered", by=step.doing, kept=len(kept), left_out=len(member.rows) - len(kept))
        member.rows = member.rows.select(kept)

    def row(self, index: int) -> Row:
        """See :meth:`Dataset.row`."""
        member, number = self._found(int(index))
        row = member.rows[number]
        made, problem = self.tried(row, member.steps)
        if problem is not None:
            raise WrongRows([problem], count=1, doing="taken")
        if len(made) != 1:
            place = self.place(row[ORIGIN])
            raise InvalidInput("data", f"{place} becomes {len(made)} rows; of a LazyDataset each must become one")
        return {name: value for name, value in made[0].items() if name != ORIGIN}

    def place_of(self, index: int) -> Place:
        """See :meth:`Dataset.place_of`."""
        member, number = self._found(int(index))
        return self.place(int(member.rows.select_columns([ORIGIN])[number][ORIGIN]))

    def __len__(self) -> int:
        if len(self.members) > 1 and not self.is_mixed:
            raise InvalidInput("dataset", f"has {len(self.members)} members; call mix_dataset() first")
        sizes = [len(member.rows) for member in self.members]
        return len(sizes) * max(sizes, default=0) if self._interleaves else sum(sizes)

    def _found(self, index: int) -> tuple[Member, int]:
        """The member and the row in it of a row of the whole."""
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"row {index} of a data set of {size}")
        index %= size
        if self._interleaves:
            member = self.members[index % len(self.members)]
            return member, index // len(self.members) % len(member.rows)
        for member in self.members:
            if index < len(member.rows):
                return member, index
            index -= len(member.rows)
        raise AssertionError("an index below the size lies in a member")
