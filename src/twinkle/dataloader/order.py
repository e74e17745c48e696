"""In which order a loader takes rows, and where in that order it stands: decided by a seed and one number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of every pass.

    A pass takes each row once. ``consumed`` counts the rows taken in all passes, those of all ranks; together with the
    seed it says which row comes next, whatever the size of a batch was until then.
    """

    num_rows: int
    seed: int
    shuffles: bool

    def of_pass(self, number: int) -> np.ndarray:
        """The rows of a pass, in order."""
        if not self.shuffles:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, number]).permutation(self.num_rows)

    def replacements(self, number: int, row: int, count: int) -> np.ndarray:
        """Rows to try in place of one that cannot be used; the same however often a run is taken up again."""
        return np.random.default_rng([self.seed, number, row, 1]).integers(self.num_rows, size=count)

    def batches(self, number: int, start: int, batch_size: int, least: int) -> list[np.ndarray]:
        """The global batches of a pass from its row ``start`` on; a last one under ``least`` rows is dropped."""
        rows = self.of_pass(number)[start:]
        parts = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
        return parts[:-1] if parts and len(parts[-1]) < least else parts


def num_batches(num_rows: int, batch_size: int, least: int) -> int:
    """How many batches a pass has."""
    whole, left = divmod(num_rows, batch_size)
    return whole + (left >= max(least, 1))
