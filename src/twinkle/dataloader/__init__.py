"""Batches of rows, by rank, resumable to the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.dataloader.fetch import Skipped, SkippedRow
    from twinkle.dataloader.loader import DataLoader

__all__ = ["DataLoader", "Skipped", "SkippedRow"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "DataLoader": "twinkle.dataloader.loader",
        "Skipped": "twinkle.dataloader.fetch",
        "SkippedRow": "twinkle.dataloader.fetch",
    },
)
