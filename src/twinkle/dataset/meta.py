"""Which rows a data set is made of."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex

from twinkle.core.errors import InvalidInput

_NUMBERS = itertools.count(1)


class NoData(InvalidInput, ValueError):
    """A data set that names no rows; scripts know it as ``ValueError``."""


@dataclass(eq=False)
class DatasetMeta:
    """Rows of a hub's data set, of local files, or of memory.

    Args:
        dataset_id: ``ms://org/name``, ``hf://org/name``, ``org/name``, or a file or folder on this machine.
        subset_name: The configuration of a hub's data set.
        split: The split of a hub's data set; local data is always ``train``.
        data_slice: The rows to take, by index and in this order; an index past the end begins anew, so
            ``range(500)`` of 100 rows takes each five times.
        data: Rows in memory instead: a list of rows, a dict of columns, a function that yields rows, or a data set of
            Hugging Face's.

    Raises:
        NoData: Neither an id nor data is given.
        InvalidInput: ``data_slice`` holds something else than numbers of rows.
    """

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: Iterable[int] | None = None
    data: Any = None

    def __post_init__(self) -> None:
        self._number = next(_NUMBERS)
        if not self.dataset_id and self.data is None:
            raise NoData("dataset_id", "is empty and data is None; name a data set or pass rows")
        if self.data_slice is not None and not isinstance(self.data_slice, range):
            self.data_slice = _row_numbers(self.data_slice)

    def get_id(self) -> str:
        """The key of these rows among the members of a data set. Equal descriptions have equal keys; rows in memory are
        found again by the same object alone.
        """
        name = self.dataset_id or f"memory-{self._number}"
        key = f"{name}:{self.subset_name}:{self.split}"
        if self.data_slice is None:
            return key
        digest = hashlib.sha256(repr(list(self.data_slice)).encode()).hexdigest()
        return f"{key}:{digest[:12]}"


def _row_numbers(data_slice: object) -> list[int]:
    if not isinstance(data_slice, Iterable) or isinstance(data_slice, str | bytes):
        raise InvalidInput("data_slice", f"is {data_slice!r}; send the numbers of rows, like range(100) or [0, 5]")
    numbers: list[int] = []
    for index in data_slice:
        if isinstance(index, bool) or not isinstance(index, SupportsIndex):
            raise InvalidInput("data_slice", f"holds {index!r}, which is no number of a row; send whole numbers")
        numbers.append(operator.index(index))
    return numbers
