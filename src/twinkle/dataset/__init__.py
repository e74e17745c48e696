"""Rows from files and hubs: chosen, mapped, encoded, packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.errors import ConfigError
from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.dataset.dataset import Dataset
    from twinkle.dataset.iterable import IterableDataset
    from twinkle.dataset.lazy import LazyDataset
    from twinkle.dataset.meta import DatasetMeta
    from twinkle.dataset.packing import IterablePackingDataset, PackingDataset
    from twinkle.dataset.problems import Place, Problem, WrongRows
    from twinkle.dataset.report import Report

__all__ = [
    "Dataset",
    "DatasetMeta",
    "IterableDataset",
    "IterablePackingDataset",
    "LazyDataset",
    "PackingDataset",
    "Place",
    "Problem",
    "Report",
    "WrongRows",
]

NEEDED = ("datasets", "pyarrow", "filelock", "transformers", "torch")

_load = lazy_attributes(
    __name__,
    {
        "Dataset": "twinkle.dataset.dataset",
        "DatasetMeta": "twinkle.dataset.meta",
        "IterableDataset": "twinkle.dataset.iterable",
        "IterablePackingDataset": "twinkle.dataset.packing",
        "LazyDataset": "twinkle.dataset.lazy",
        "PackingDataset": "twinkle.dataset.packing",
        "Place": "twinkle.dataset.problems",
        "Problem": "twinkle.dataset.problems",
        "Report": "twinkle.dataset.report",
        "WrongRows": "twinkle.dataset.problems",
    },
)


def __getattr__(name: str) -> object:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        raise ConfigError(
            f"data sets need {error.name}, which is not installed: pip install 'twinkle-queue[scripts]'"
        ) from error
